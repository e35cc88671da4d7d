import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.core.layers.products import ProductLinear, ProductRegime, on_gradient, straight_through


class Noisy(ProductRegime):
    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(inputs, weight) + 1


def test_the_very_same_layers_and_parameters_come_back(model: PreTrainedModel) -> None:
    layers, names = dict(linears(model)), list(model.state_dict())
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    regime = Noisy(None, torch.Generator())
    regime.start(model, 1)
    assert all(type(layer) is ProductLinear for _, layer in linears(model))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert list(model.state_dict()) == names
    regime.finish(model)
    assert dict(linears(model)) == layers and all(type(layer) is nn.Linear for layer in layers.values())


def test_a_layer_adds_its_bias_and_is_plain_in_evaluation_mode() -> None:
    layer, inputs = nn.Linear(3, 2), torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    changed = ProductLinear(layer, lambda x, w: 2 * functional.linear(x, w))
    assert torch.allclose(changed(inputs), 2 * (layer(inputs) - layer.bias) + layer.bias)
    changed(inputs).sum().backward()
    assert layer.bias.grad.tolist() == [20, 20]
    assert torch.equal(changed.eval()(inputs), layer(inputs))


def test_a_layer_multiplies_in_float32_also_under_autocast() -> None:
    layer, inputs = nn.Linear(3, 2), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    changed = ProductLinear(layer, functional.linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
        output = changed(inputs)
    assert torch.equal(output, changed(inputs)) and torch.allclose(output, layer(inputs))


def test_a_layer_that_is_refused_leaves_the_model_as_it_was(model: PreTrainedModel) -> None:
    class Choosy(Noisy):
        def require(self, name: str, layer: nn.Linear) -> None:
            if name.endswith("down_proj"):
                raise ValueError(f"layer {name} is refused")

    with pytest.raises(ValueError, match="layer model.layers.0.mlp.down_proj is refused"):
        Choosy(None, torch.Generator()).start(model, 1)
    assert all(type(layer) is nn.Linear for _, layer in linears(model))


def test_a_change_of_values_or_of_their_gradient_leaves_the_other_as_it_is() -> None:
    values = torch.tensor([0.4, 1.6], requires_grad=True)
    changed = straight_through(values, torch.round)
    changed.backward(torch.tensor([2.0, 3.0]))
    assert changed.tolist() == [0, 2] and values.grad.tolist() == [2, 3]
    values = torch.tensor([0.4, 1.6], requires_grad=True)
    same = on_gradient(values, torch.round)
    same.backward(torch.tensor([2.3, 3.9]))
    assert torch.equal(same, values) and values.grad.tolist() == [2, 4]


def test_changes_that_change_nothing_have_the_right_gradient() -> None:
    values = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: on_gradient(straight_through(x, torch.clone), torch.clone) ** 2, values)


def test_figures_are_summed_where_they_lie_and_read_when_somebody_asks() -> None:
    regime = ProductRegime(None, torch.Generator())
    regime.count("share", torch.ones((), device="meta"), torch.ones((), device="meta"))  # float() of it would raise
    regime.count("other", torch.tensor(3.0), torch.tensor(4.0))
    del regime._sums["share"]
    assert regime.figures() == {"other": 0.75}
