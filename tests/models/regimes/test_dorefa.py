import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.core.learning.training import train
from models.params import TrainingParams
from models.regimes.dorefa import (
    Hooks,
    Params,
    activation_scale,
    normal_clip,
    quantize_activation,
    quantize_gradient,
    quantize_weight,
)
from tests.models.rounding import P_VALUE, copies, mean_p_value, normal


def test_weights_of_two_bits_by_hand() -> None:
    # tanh is 0.8, -0.8, 0.1 and -0.5; of the scale 0.8 the levels are ±1 and ±1/3.
    weight = torch.tensor([[0.8, -0.8], [0.1, -0.5]]).atanh()
    wanted = 0.8 * torch.tensor([[1, -1], [1 / 3, -1 / 3]])
    assert torch.allclose(quantize_weight(weight, 2), wanted)


def test_weights_of_one_bit_are_signs_times_their_mean_magnitude() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.0], [4.0, -0.5, 4.5]], requires_grad=True)
    kept = quantize_weight(weight, 1)
    assert kept.tolist() == [[2, -2, 2], [2, -2, 2]]
    kept.backward(torch.full((2, 3), 5.0))
    assert weight.grad.tolist() == [[5.0] * 3] * 2


def test_weights_pass_the_gradient_of_tanh_and_are_tanh_with_many_bits() -> None:
    weight = normal(8, 8, seed=0, dtype=torch.float64).requires_grad_(True)
    kept = quantize_weight(weight, 16)
    assert torch.allclose(kept, weight.tanh(), atol=2.0**-16)
    kept.sum().backward()
    assert torch.allclose(weight.grad, 1 - weight.detach().tanh() ** 2)


def test_activations_of_three_bits_by_hand() -> None:
    # Scale 3: the integers from -3 to 3.
    inputs = torch.tensor([-7.0, -1.6, 0.4, 2.2, 3.5], requires_grad=True)
    kept = quantize_activation(inputs, 3, torch.tensor(3.0))
    assert kept.tolist() == [-3, -2, 0, 2, 3]
    kept.backward(torch.ones(5))
    assert inputs.grad.tolist() == [0, 1, 1, 1, 0]
    assert quantize_activation(inputs, 1, torch.tensor(3.0)).detach().unique().tolist() == pytest.approx(
        [-(3 + 1.6 + 0.4 + 2.2 + 3) / 5, (3 + 1.6 + 0.4 + 2.2 + 3) / 5]
    )


def test_the_scale_is_the_root_mean_square_times_the_factor_or_the_maximum() -> None:
    inputs = torch.tensor([3.0, -4.0, 0.0, 0.0])
    assert float(activation_scale(inputs, 1.2)) == pytest.approx(3.0)
    assert float(activation_scale(inputs, 2.0)) == 4.0
    # Three values, -c, 0 and c: the least squared error of a normal variable is at c = 1.224 (Max, 1960).
    assert normal_clip(2) == pytest.approx(1.224, abs=0.05)


def test_gradients_of_two_bits_take_the_papers_four_values_of_each_document() -> None:
    gradient = torch.stack([normal(7, 6, seed=0), 100 * normal(7, 6, seed=1)])
    drawn = quantize_gradient(gradient, 2, torch.Generator().manual_seed(0))
    for document, kept in zip(gradient, drawn, strict=True):
        levels = document.abs().max() * torch.tensor([-1, -1 / 3, 1 / 3, 1])
        assert torch.allclose(kept.unique(), levels)
    assert not quantize_gradient(torch.zeros(1, 2, 4), 2, torch.Generator()).any()


@pytest.mark.parametrize("num_bits", [1, 2, 6])
def test_rounding_gradients_has_no_bias(num_bits: int) -> None:
    gradient = normal(5, 4, seed=0)
    drawn = quantize_gradient(copies(gradient), num_bits, torch.Generator().manual_seed(0))
    assert mean_p_value(drawn, gradient) > P_VALUE


def test_the_backward_products_take_what_was_rounded() -> None:
    made = Hooks(Params(weight_bits=2, activation_bits=4, gradient_bits=32), torch.Generator())
    inputs, weight, gradient = normal(2, 5, 6, seed=0), normal(8, 6, seed=1), normal(2, 5, 8, seed=2)
    kept = quantize_activation(inputs, 4, activation_scale(inputs, normal_clip(4)))
    inside = inputs.abs() <= activation_scale(inputs, normal_clip(4))
    made.multiply(inputs.requires_grad_(True), weight.requires_grad_(True)).backward(gradient)
    assert torch.allclose(inputs.grad, (gradient @ quantize_weight(weight, 2)).detach() * inside)
    product = torch.einsum("bto,bti->oi", gradient, kept)
    assert torch.allclose(weight.grad, product * (1 - weight.detach().tanh() ** 2), atol=1e-5)


def test_the_rounded_weights_are_left_in_a_plain_model(model: PreTrainedModel) -> None:
    made = Hooks(Params(weight_bits=2), torch.Generator().manual_seed(0))
    train(model, [list(range(3, 30))] * 4, TrainingParams(batch_tokens=64), [made])
    for _, layer in linears(model):
        levels = layer.weight.unique()
        assert type(layer) is nn.Linear and len(levels) == 4
        assert torch.allclose(levels / levels.max(), torch.tensor([-1, -1 / 3, 1 / 3, 1]))


def test_a_finished_model_answers_with_rounded_activations_where_it_is_asked_to(model: PreTrainedModel) -> None:
    tokens, made = torch.arange(3, 40)[None], Hooks(Params(activation_bits=2, weight_bits=32), torch.Generator())
    layers = [layer for _, layer in linears(model)]
    with torch.no_grad():
        plain = model(tokens).logits
        with made.answering(model):
            rounded = model(tokens).logits
        assert not torch.allclose(plain, rounded, rtol=0.1)
        assert torch.equal(model(tokens).logits, plain)
    assert [layer for _, layer in linears(model)] == layers


@pytest.mark.parametrize("trained", ["up_proj", "bias"])
def test_a_frozen_weight_is_neither_rounded_in_products_nor_in_the_end(model: PreTrainedModel, trained: str) -> None:
    for _, layer in linears(model):
        layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    made = Hooks(Params(weight_bits=2, activation_bits=32, gradient_bits=32), torch.Generator())
    train(model, [list(range(3, 30))] * 4, TrainingParams(batch_tokens=64), [made])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (trained not in name), name
    inputs, frozen = normal(3, 8, seed=0), normal(4, 8, seed=1)
    assert torch.equal(made.multiply(inputs, frozen), nn.functional.linear(inputs, frozen))
