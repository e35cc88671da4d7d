"""Which matrices are read as float16, and that their products stay what they were."""

import pytest
import torch

from models.layers import half_product
from models.layers.half_product import fits_half


def matrix() -> torch.Tensor:
    """[64, 64] with columns from below float16's smallest step to its largest value."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(64, 64, generator=rng) * torch.logspace(-9, 4, 64)


def test_only_weights_that_float16_holds_are_read_as_float16() -> None:
    assert fits_half(matrix().bfloat16().float())
    assert not fits_half(matrix())
    assert not fits_half((10 * matrix()).bfloat16().float())
    assert not fits_half(matrix().bfloat16())


@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_a_product_is_exact_to_the_rounding_of_its_smallest_weights(num_rows: int) -> None:
    weight, rng = matrix().bfloat16().float(), torch.Generator().manual_seed(1)
    x, bias = torch.randn(num_rows, 64, generator=rng), torch.randn(64, generator=rng)
    got = half_product.half_product(weight)(x, bias).double()
    wanted = x.double() @ weight.double().T + bias.double()
    allowed = x.abs().double() @ (half_product.HALF_STEP + 1e-6 * weight.abs().double()).T
    assert bool(((got - wanted).abs() <= allowed + 1e-6).all())


def test_a_matrix_that_float16_does_not_hold_keeps_its_values() -> None:
    weight, x = matrix(), torch.ones(2, 64)
    assert torch.equal(half_product.product(weight)(x), torch.nn.functional.linear(x, weight))
