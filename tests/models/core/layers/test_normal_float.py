"""NF4: the paper's levels, packing and scales that come back bit by bit."""

import pytest
import torch

from models.core.layers import normal_float
from models.core.layers.normal_float import NormalFloats, Scales

# arXiv:2305.14314, appendix E.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def weights(num_rows: int = 64) -> torch.Tensor:
    return torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(0))


def test_the_levels_are_the_published_ones() -> None:
    assert torch.allclose(normal_float.levels(), torch.tensor(PUBLISHED), atol=2e-7, rtol=0)


def test_a_block_by_hand() -> None:
    block = torch.tensor([[2.0, -2.0, 0.0, 0.9]])
    found = normal_float.encode(block, block_size=4, double=False)
    assert found.codes.tolist() == [[15, 0, 7, 12]]  # 0.45 lies nearest to 0.4407
    assert found.floats().tolist() == [[2.0, -2.0, 0.0, pytest.approx(2 * 0.44070983)]]


def test_what_is_stored_comes_back_bit_by_bit() -> None:
    found = normal_float.encode(weights())
    assert isinstance(found.scales, Scales)
    words = normal_float.pack(found.codes)
    assert words.shape == (64, 128) and torch.equal(normal_float.unpack(words), found.codes)
    again = NormalFloats(normal_float.unpack(words), Scales(*(part.clone() for part in found.scales)))
    assert torch.equal(again.floats(), found.floats())


def test_weights_that_are_levels_come_back_as_they_are() -> None:
    once = normal_float.encode(weights(), double=False).floats()
    assert torch.equal(normal_float.encode(once, double=False).floats(), once)


def test_scales_lose_less_than_their_8_bits_say() -> None:
    exact = normal_float.encode(weights(), double=False).scales
    found = normal_float.encode(weights(), double=True).scales
    assert isinstance(found, Scales) and isinstance(exact, torch.Tensor)
    assert (found.floats() - exact).abs().max() <= (exact - exact.mean()).abs().max() / 16
    assert found.values.nbytes + found.blocks.nbytes + found.mean.nbytes == 256 + 4 + 4


def test_normal_weights_lose_less_than_to_integers_of_as_many_bits() -> None:
    from models.core.layers import integers

    weight = weights(256)
    normal = (normal_float.encode(weight, double=False).floats() - weight).square().mean()
    uniform = (integers.quantize(weight, 4, 64, symmetric=True).floats() - weight).square().mean()
    assert normal < 0.9 * uniform


def test_a_block_of_zeros_stays_zero() -> None:
    weight = weights()
    weight[3] = 0
    assert not normal_float.encode(weight).floats()[3].any()


def test_blocks_that_do_not_fill_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size 64 does not divide a width of 100"):
        normal_float.encode(torch.zeros(2, 100))
