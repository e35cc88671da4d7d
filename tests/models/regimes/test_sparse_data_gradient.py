import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.regimes.sparse_data_gradient import Hooks, Params, keep_two_of_four, preserve_l1
from tests.models.rounding import normal


def test_the_two_smaller_of_every_four_become_zero() -> None:
    gradient = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 7.0]])
    assert keep_two_of_four(gradient).tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0]]


def test_exactly_two_of_four_are_kept_also_among_equals() -> None:
    for gradient in (normal(20, 5, 32, seed=0), torch.ones(3, 16)):
        kept = keep_two_of_four(gradient)
        assert (kept.unflatten(-1, (-1, 4)).count_nonzero(dim=-1) == 2).all()
        assert torch.equal(kept[kept != 0], gradient[kept != 0])


def test_the_l1_norm_of_each_group_is_preserved_and_the_kept_two_scaled_alike() -> None:
    gradient = torch.cat([normal(40, 16, seed=0, dtype=torch.float64), torch.zeros(1, 16)])
    kept = keep_two_of_four(gradient)
    scaled = preserve_l1(gradient, kept)
    groups, wanted = (values.unflatten(-1, (-1, 4)).abs().sum(-1) for values in (scaled, gradient))
    assert torch.allclose(groups, wanted, rtol=1e-15, atol=0)
    assert torch.equal(scaled.sign(), kept.sign())
    by_hand = preserve_l1(torch.tensor([[1.0, -3.0, 2.0, 2.0]]), torch.tensor([[0.0, -3.0, 2.0, 0.0]]))
    assert torch.allclose(by_hand, torch.tensor([[0.0, -4.8, 3.2, 0.0]]))


@pytest.mark.parametrize("preserve", [False, True])
def test_only_the_data_gradient_is_sparse(preserve: bool) -> None:
    inputs, weight, gradient = normal(2, 5, 6, seed=0), normal(8, 6, seed=1), normal(2, 5, 8, seed=2)
    inputs.requires_grad_(True), weight.requires_grad_(True)
    made = Hooks(Params(preserve_l1=preserve), torch.Generator())
    output = made.multiply(inputs, weight)
    assert torch.equal(output, nn.functional.linear(inputs, weight))
    output.backward(gradient)
    sparse = keep_two_of_four(gradient)
    sparse = preserve_l1(gradient, sparse) if preserve else sparse
    assert torch.equal(inputs.grad, sparse @ weight)
    assert torch.allclose(weight.grad, torch.einsum("bto,bti->oi", gradient, inputs), atol=1e-5)
    assert made.figures()["kept_l1"] == pytest.approx(
        float(keep_two_of_four(gradient).abs().sum() / gradient.abs().sum())
    )


def test_outputs_that_are_no_multiple_of_four_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(128, 254)
    with pytest.raises(ValueError, match=r"layer model.layers.1.mlp.up_proj has 254 outputs; .* a multiple of 4"):
        Hooks(Params(), torch.Generator()).start(model, 1)
    assert all(type(layer) is nn.Linear for _, layer in linears(model))
