"""NF4: the code book, a block by hand, how far a weight moves, and a product that keeps nothing but packed weights."""

import pytest
import torch
from scipy.stats import norm
from torch import nn

from models.held import held_for_backward
from models.layers import nf4


def test_codes_are_quantiles_of_a_normal_distribution() -> None:
    # Seven values below zero and eight above; the outermost one leaves half of 1/32 and of 1/30 outside, on average.
    end = 1 - (1 / 32 + 1 / 30) / 2
    below = [norm.ppf(1 - end + (end - 0.5) * i / 7) for i in range(7)]
    above = [norm.ppf(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    largest = norm.ppf(end)
    assert [value / largest for value in [*below, 0.0, *above]] == pytest.approx(nf4.CODES, abs=1e-6)


def test_a_block_by_hand() -> None:
    weight = torch.zeros(64)
    weight[:5] = torch.tensor([2.0, -2.0, 0.15, 1.0, -0.6])  # scale 2
    packed = nf4.quantize(weight)
    wanted = [15, 0, 8, 12, 4] + [7] * 59  # 0.075 is nearest 0.0796, 0.5 nearest 0.4407, −0.3 nearest −0.2844
    codes = torch.stack([packed.codes >> 4, packed.codes & 15], dim=1).flatten()
    assert codes.tolist() == wanted
    # One block: its scale is the mean, so that what is left for 8 bits is zero.
    assert nf4.dequantize(packed)[:5].tolist() == pytest.approx([2 * nf4.CODES[code] for code in wanted[:5]])


def test_a_weight_moves_by_half_a_gap_at_most() -> None:
    weight = torch.randn(96, 200, generator=torch.Generator().manual_seed(0))
    packed = nf4.quantize(weight)
    assert nf4.dequantize(packed).shape == weight.shape
    scales = nf4._blocks(weight.flatten(), 64).abs().amax(dim=1)
    # Half of the widest gap, and what eight bits take of a scale: half of a 1/8 step of a float with 3 bits.
    error = nf4._blocks((nf4.dequantize(packed) - weight).flatten(), 64).abs().amax(dim=1)
    gap = max(b - a for a, b in zip(nf4.CODES, nf4.CODES[1:], strict=False))
    assert (error <= gap / 2 * scales + (scales - scales.mean()).abs().max() / 16 + 1e-6).all()


def test_on_normal_weights_it_errs_less_than_sixteen_even_steps() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    scale = weight.view(-1, 64).abs().amax(dim=1, keepdim=True) / 7
    even = ((weight.view(-1, 64) / scale).round().clamp(-8, 7) * scale).view(256, 256)
    assert (nf4.dequantize(nf4.quantize(weight)) - weight).norm() < 0.92 * (even - weight).norm()


def test_a_weight_takes_4_127_bits() -> None:
    packed = nf4.quantize(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)))
    assert 8 * (packed.num_bytes - 4) / 1024**2 == pytest.approx(4 + 8 / 64 + 32 / (64 * 256))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 64), (65, 63)])
def test_sizes_that_fill_no_block_come_back(shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape)
    assert torch.allclose(nf4.dequantize(nf4.quantize(weight)), weight, rtol=0.05)
    assert torch.equal(nf4.dequantize(nf4.quantize(0 * weight)), 0 * weight)


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")])])
def test_weights_without_a_scale_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="NF4 takes finite weights"):
        nf4.quantize(weight)


def test_a_product_is_that_of_the_dequantized_weight_and_keeps_no_copy_of_it() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 64).requires_grad_(False)
    packed = nf4.Nf4Linear(layer)
    inputs = torch.randn(2, 5, 128, requires_grad=True)
    outputs = packed(inputs)
    outputs.square().sum().backward()
    same = inputs.detach().clone().requires_grad_(True)
    wanted = nn.functional.linear(same, nf4.dequantize(nf4.quantize(layer.weight)), layer.bias)
    wanted.square().sum().backward()
    assert torch.allclose(outputs, wanted) and torch.allclose(inputs.grad, same.grad)
    assert held_for_backward(packed, lambda: packed(inputs).sum()) == 0
