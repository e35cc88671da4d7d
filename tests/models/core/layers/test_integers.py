import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import nn

from models.core.layers import integers
from models.core.layers.integers import Float8Linear, IntegerLinear, Integers, to_float8, token_scales

ROW = torch.tensor([[0.5, -1.5, 3.0, 3.5]])
WEIGHT = Integers(torch.tensor([[1, 2], [-3, 4]], dtype=torch.int8), torch.tensor([[0.5], [2.0]]))


def test_a_symmetric_grid_by_hand() -> None:
    found = integers.quantize(ROW, bits=4, group_size=None, symmetric=True)
    assert found.scales.tolist() == [[0.5]]  # 3.5 / 7
    assert found.values.tolist() == [[1, -3, 6, 7]] and found.zeros is None
    assert torch.equal(found.floats(), ROW)


def test_each_group_has_its_own_scale_and_one_of_zeros_stays_zero() -> None:
    found = integers.quantize(torch.cat([ROW, 8 * ROW], 1), bits=4, group_size=4, symmetric=True)
    assert found.scales.tolist() == [[0.5, 4.0]]
    assert found.values.tolist() == [[1, -3, 6, 7] * 2]
    for symmetric in (True, False):
        assert not integers.quantize(torch.zeros(2, 8), 4, 4, symmetric).floats().any()


def test_a_grid_with_a_zero_point_by_hand() -> None:
    found = integers.quantize(ROW, bits=2, group_size=None, symmetric=False)
    assert found.scales.item() == pytest.approx(5 / 3)  # −1.5 … 3.5 over 3 steps
    assert found.zeros is not None and found.zeros.tolist() == [[-1]]  # −2 + 0.9
    assert found.values.tolist() == [[-1, -2, 1, 1]]


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_error_is_above_half_a_step(bits: int, symmetric: bool) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(bits))
    found = integers.quantize(weight, bits, 32, symmetric)
    steps = found.scales.repeat_interleave(32, 1)
    # Rounding the zero point moves the ends of the grid by half a step.
    most = 0.5 if symmetric else 1.0
    assert ((found.floats() - weight).abs() <= (most + 1e-4) * steps).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_packing_is_the_formats_own_and_comes_back(bits: int) -> None:
    low, high = integers.limits(bits, symmetric=False)
    values = torch.randint(low, high + 1, (5, 37), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    words = integers.pack(values, bits)
    assert torch.equal(words, pack_to_int32(values, bits))
    assert torch.equal(integers.unpack(words, bits, 37), values)


@pytest.mark.parametrize("width", [100, 5000])
def test_products_are_exact_where_floats_would_round(width: int) -> None:
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randint(100, 128, (3, width), generator=rng).to(torch.int8) for _ in range(2))
    assert torch.equal(integers.product(left, right).long(), left.long() @ right.long().T)


def test_what_no_grid_can_be_is_refused() -> None:
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"bits must be 2 to 8; got {bits}"):
            integers.quantize(ROW, bits, None, symmetric=True)
    with pytest.raises(ValueError, match="group_size 3 does not divide a width of 4"):
        integers.quantize(ROW, 4, 3, symmetric=True)


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
