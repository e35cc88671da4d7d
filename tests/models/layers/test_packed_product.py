"""Which matrices are packed, and that their products stay what they were."""

import pytest
import torch

from models.layers.packed_product import (
    HALF_STEP,
    bfloat16_product,
    fits_half,
    half_product,
    product,
    takes_bfloat16,
)


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
def test_a_product_in_half_is_exact_to_the_rounding_of_its_smallest_weights(num_rows: int) -> None:
    weight, rng = matrix().bfloat16().float(), torch.Generator().manual_seed(1)
    x, bias = torch.randn(num_rows, 64, generator=rng), torch.randn(64, generator=rng)
    got = half_product(weight)(x, bias).double()
    wanted = x.double() @ weight.double().T + bias.double()
    allowed = x.abs().double() @ (HALF_STEP + 1e-6 * weight.abs().double()).T
    assert bool(((got - wanted).abs() <= allowed + 1e-6).all())


def test_a_matrix_that_float16_does_not_hold_keeps_its_values() -> None:
    weight, x = matrix(), torch.ones(2, 64)
    assert torch.equal(product(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.skipif(not takes_bfloat16(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bfloat16 products here")
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_a_packed_matrix_in_bfloat16_gives_the_rounded_product(num_rows: int) -> None:
    weight, rng = matrix().bfloat16(), torch.Generator().manual_seed(1)
    x, bias = (torch.randn(rows, 64, generator=rng).bfloat16() for rows in (num_rows, 1))
    got = bfloat16_product(weight)(x, bias[0]).double()
    wanted = x.double() @ weight.double().T + bias[0].double()
    allowed = 2.0**-8 * wanted.abs() + 1e-6 * (x.abs().double() @ weight.abs().double().T)
    assert bool(((got - wanted).abs() <= allowed).all())


def test_only_matrices_in_bfloat16_are_packed_as_such() -> None:
    assert not takes_bfloat16(torch.zeros(1, 1))
    assert not takes_bfloat16(torch.zeros(1, 1, dtype=torch.bfloat16, device="meta"))
