import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from models.core.layers import integers

ROW = torch.tensor([[0.5, -1.5, 3.0, 3.5]])


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
