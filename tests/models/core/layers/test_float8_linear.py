"""The 8-bit float layer: numbers of e4m3 by hand."""

import torch

from models.core.layers.float8_linear import Float8Linear, to_float8


def test_rounding_is_to_the_nearest_of_its_numbers_ties_to_even() -> None:
    rows = torch.tensor([[448.0, 17.0, 19.0, 25.0, 2.0**-9, 0.4 * 2.0**-9, -440.0, 0.3]])
    values, scales = to_float8(rows)
    # 17 and 19 lie between 16, 18 and 20; the least number is 2⁻⁹; −440 is nearer to −448 than to −416.
    assert scales.item() == 1.0
    assert values.float().tolist() == [[448.0, 16.0, 20.0, 24.0, 2.0**-9, 0.0, -448.0, 0.3125]]


def test_each_token_and_each_row_has_its_own_scale() -> None:
    values, scales = to_float8(torch.tensor([[1.0, 0.5], [4.0, 2.0]]))
    layer = Float8Linear(values, scales, None)
    assert torch.allclose(layer(torch.tensor([[100.0, 50.0]])), torch.tensor([[125.0, 500.0]]))


def test_zeros_have_a_scale() -> None:
    values, scales = to_float8(torch.zeros(1, 4))
    assert scales.item() == 1.0 and not values.float().any()
