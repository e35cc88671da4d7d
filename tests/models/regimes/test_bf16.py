"""Mixed precision multiplies in bfloat16 and keeps everything else in float32."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from models.learning.counting import counted
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


def test_less_is_held_for_each_token(tiny_target) -> None:
    model = load(tiny_target)
    regime = start(model)

    def held(num_rows: int, context: AbstractContextManager[object]) -> int:
        token_ids = torch.ones(num_rows, 32, dtype=torch.int64)
        with context, counted(model) as cost:
            gradients(model, input_ids=token_ids, labels=token_ids)
        return cost.peak_activation_bytes

    plain = held(16, nullcontext()) - held(8, nullcontext())
    mixed = held(16, regime.around(0)) - held(8, regime.around(0))
    assert mixed < 0.75 * plain


def test_weights_of_another_format_are_refused(tiny_target) -> None:
    with pytest.raises(ValueError, match="keeps weights in float32; the model's are torch.bfloat16"):
        start(load(tiny_target).to(torch.bfloat16))
