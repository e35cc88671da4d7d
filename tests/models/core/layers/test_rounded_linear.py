import torch
from torch import nn

from models.core.layers.integers import Integers
from models.core.layers.rounded_linear import Float8Linear, IntegerLinear, to_float8, token_scales

WEIGHT = Integers(torch.tensor([[1, 2], [-3, 4]], dtype=torch.int8), torch.tensor([[0.5], [2.0]]))


def test_a_scale_a_token_by_hand() -> None:
    layer = IntegerLinear(WEIGHT, None, input_scale=None)
    # Token scales 1 and 0.01: integers (127, −1) and (127, 64), 63.5 being rounded to even.
    outputs = layer(torch.tensor([[[127.0, -1.0], [1.27, 0.635]]]))
    expected = [[62.5, -770.0], [0.01 * 0.5 * 255, 0.01 * 2 * -125]]
    assert torch.allclose(outputs, torch.tensor([expected]), rtol=1e-6)


def test_a_fixed_scale_clips_what_is_larger() -> None:
    bias = nn.Parameter(torch.tensor([10.0, 20.0]))
    layer = IntegerLinear(WEIGHT, bias, input_scale=torch.tensor([1.0]))
    assert layer(torch.tensor([[1000.0, 0.4]])).tolist() == [[73.5, -742.0]]


def test_a_token_that_is_not_a_number_stays_one_and_spoils_no_other() -> None:
    outputs = IntegerLinear(WEIGHT, None, input_scale=None)(torch.tensor([[float("nan"), 1.0], [127.0, -1.0]]))
    assert outputs[0].isnan().all()
    assert outputs[1].tolist() == [62.5, -770.0]


def test_rounding_is_to_the_nearest_of_its_numbers_ties_to_even() -> None:
    rows = torch.tensor([[448.0, 17.0, 19.0, 25.0, 2.0**-9, 0.4 * 2.0**-9, -440.0, 0.3]])
    values, scales = to_float8(rows)
    # 17 and 19 lie between 16, 18 and 20; the least number is 2⁻⁹; −440 is nearer to −448 than to −416.
    assert scales.item() == 1.0
    assert values.float().tolist() == [[448.0, 16.0, 20.0, 24.0, 2.0**-9, 0.0, -448.0, 0.3125]]


def test_zeros_have_a_scale() -> None:
    assert token_scales(torch.zeros(1, 4)).tolist() == [[1.0]]
    values, scales = to_float8(torch.zeros(1, 4))
    assert scales.item() == 1.0 and not values.float().any()


def test_each_token_and_each_row_has_its_own_scale() -> None:
    values, scales = to_float8(torch.tensor([[1.0, 0.5], [4.0, 2.0]]))
    layer = Float8Linear(values, scales, None)
    assert torch.allclose(layer(torch.tensor([[100.0, 50.0]])), torch.tensor([[125.0, 500.0]]))
