"""Mixed precision multiplies in bfloat16 and keeps everything else in float32."""

import pytest
import torch

from models.counting import counted
from models.regimes import Plan, bf16
from tests.models.regimes.world import batch, gradients, load


def start(model):
    regime = bf16.regime(bf16.Params(), torch.Generator())
    regime.start(model, Plan(1, 1))
    return regime


def test_products_are_in_bfloat16_and_weights_and_loss_are_not(tiny_target) -> None:
    model, seen = load(tiny_target), []
    regime = start(model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with regime.around(0):
        loss = model(**batch()).loss
        loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


def test_the_gradient_is_that_of_float32_up_to_rounding(tiny_target) -> None:
    model = load(tiny_target)
    exact = gradients(model)
    with start(model).around(0):
        rounded = gradients(model)
    for name, gradient in exact.items():
        # bfloat16 has 8 bits of mantissa; errors of products add up over two layers.
        assert (gradient - rounded[name]).norm() < 0.05 * gradient.norm(), name


def test_less_is_held_for_the_backward_pass(tiny_target) -> None:
    model = load(tiny_target)
    with counted(model) as plain:
        gradients(model)
    with start(model).around(0), counted(model) as mixed:
        gradients(model)
    assert mixed.peak_activation_bytes < 0.95 * plain.peak_activation_bytes


def test_weights_of_another_format_are_refused(tiny_target) -> None:
    with pytest.raises(ValueError, match="keeps weights in float32; the model's are torch.bfloat16"):
        start(load(tiny_target).to(torch.bfloat16))
