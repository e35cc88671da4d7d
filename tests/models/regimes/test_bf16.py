"""Mixed precision multiplies in bfloat16 and keeps everything else in float32."""

import pytest
import torch

from models.regimes import bf16
from tests.models.regimes.world import batch, gradients, held, load, start


def test_products_are_in_bfloat16_and_weights_and_loss_are_not(tiny_target) -> None:
    model, seen = load(tiny_target), []
    regime = start(bf16, model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with regime.around(0):
        loss = model(**batch()).loss
        loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


def test_the_gradient_is_that_of_float32_up_to_rounding(model) -> None:
    exact = gradients(model)
    with start(bf16, model).around(0):
        rounded = gradients(model)
    for name, gradient in exact.items():
        # bfloat16 has 8 bits of mantissa; errors of products add up over two layers.
        assert (gradient - rounded[name]).norm() < 0.05 * gradient.norm(), name


def test_less_is_held_for_each_token(model) -> None:
    regime = start(bf16, model)

    def held_for_eight_rows() -> int:
        few, many = (torch.ones(num_rows, 32, dtype=torch.int64) for num_rows in (8, 16))
        return held(model, input_ids=many, labels=many) - held(model, input_ids=few, labels=few)

    plain = held_for_eight_rows()
    with regime.around(0):
        assert held_for_eight_rows() < 0.75 * plain


def test_weights_of_another_format_are_refused(tiny_target) -> None:
    with pytest.raises(ValueError, match="keeps weights in float32; the model's are torch.bfloat16"):
        start(bf16, load(tiny_target).to(torch.bfloat16))
