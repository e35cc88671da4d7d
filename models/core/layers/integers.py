"""Integers of few bits that stand for real numbers, x ≈ scale · (value − zero), and how they lie in memory.

Letters: O outputs and I inputs of a layer, G groups of a row.

Symmetric grids run from −(2^(bits−1) − 1) to 2^(bits−1) − 1: the lowest integer stays unused, so that nothing is
clipped and 0 is in the middle. Others use all integers, and always have one for 0.

Layers of 8-bit weights and inputs multiply integers, or floats of 8 bits (e4m3).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

# Sums of this many products of two 8-bit integers are whole numbers below 2^24, which float32 adds without rounding.
_EXACT = 1024
HIGH = 127


class Integers(NamedTuple):
    """A quantized matrix: [O, I] int8 values, whatever the bits, and [O, G] positive scales, G 1 for one scale a row.

    Zeros [O, G] int8 are the integers that stand for 0; None is 0 everywhere.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def floats(self) -> Tensor:
        """Return what the integers stand for, [O, I] float32."""
        groups: Tensor = self.values.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            groups = groups - self.zeros.float()[..., None]
        return (groups * self.scales.float()[..., None]).flatten(1)


def limits(bits: int, symmetric: bool) -> tuple[int, int]:
    """Return the lowest and highest integer; ValueError if `bits` is not from 2 to 8."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2 to 8; got {bits}")
    half = 2 ** (bits - 1)
    return (1 - half if symmetric else -half), half - 1


def num_groups(width: int, group_size: int | None) -> int:
    """Return how many groups a row of `width` has, one without `group_size`; ValueError if they don't fill the row."""
    if group_size is not None and (group_size < 1 or width % group_size):
        raise ValueError(f"group_size {group_size} does not divide a width of {width}")
    return width // (group_size or width)


def fit(
    weight: Tensor, bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Choose scales [O, G] in `dtype` and zeros [O, G] int8 that cover each group; None for zeros on a symmetric grid.

    `group_size` weights of a row share a scale, all where it is None. ValueError if `bits` or `group_size` is out of
    range.
    """
    low, high = limits(bits, symmetric)
    groups = weight.float().unflatten(1, (num_groups(weight.shape[1], group_size), -1))
    if symmetric:
        return _stored(groups.abs().amax(-1) / high, dtype), None
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = _stored((most - least) / (high - low), dtype)
    return scales, (low - least / scales.float()).round().clamp(low, high).to(torch.int8)


def encode(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Integers:
    """Round each weight to the nearest integer of its group's grid, ties to even; see `fit`."""
    low, high = limits(bits, zeros is None)
    groups = weight.float().unflatten(1, (scales.shape[1], -1)) / scales.float()[..., None]
    if zeros is not None:
        groups = groups.round() + zeros.float()[..., None]
    return Integers(groups.round().clamp(low, high).to(torch.int8).flatten(1), scales, zeros)


def quantize(
    weight: Tensor, bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype = torch.float32
) -> Integers:
    """Round to nearest on a grid that covers each group; see `fit` and `encode`."""
    return encode(weight, *fit(weight, bits, group_size, symmetric, dtype), bits)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of 8-bit integers exactly, as int32 sums would be: [N, I] and [O, I] to [N, O].

    Floats do it, because the CPU's integer product is tens of times slower where the processor has no instruction for
    it. Whole numbers from −255 to 255 of any dtype, magnitudes of a pair multiplying to 2^14 at most, become float32
    when the sums fit it, else float64.
    """
    left, right = left.float(), right.float()
    if left.shape[1] <= _EXACT:
        return left @ right.T
    parts = zip(left.split(_EXACT, 1), right.split(_EXACT, 1), strict=True)
    total: Tensor = sum((a @ b.T).double() for a, b in parts)
    return total


def pack(values: Tensor, bits: int) -> Tensor:
    """Put integers side by side into int32, the first in the lowest bits, each raised by 2^(bits−1) to be unsigned.

    [O, I] int8 become [O, ceil(I / (32 // bits))] int32; 32 // bits of them share one.
    """
    each = 32 // bits
    raised = values.to(torch.int64) + 2 ** (bits - 1)
    raised = torch.nn.functional.pad(raised, (0, -values.shape[1] % each)).unflatten(1, (-1, each))
    words = (raised << (bits * torch.arange(each, device=values.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor, bits: int, width: int) -> Tensor:
    """Take `width` integers a row out of [O, W] int32 again: the inverse of `pack`, [O, I] int8."""
    each = 32 // bits
    raised = words.to(torch.int64)[..., None] >> (bits * torch.arange(each, device=words.device))
    half: int = 2 ** (bits - 1)
    return ((raised & (2 * half - 1)) - half).flatten(1)[:, :width].to(torch.int8)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to what is stored; a group of zeros gets a scale all the same."""
    return torch.where(scales > 0, scales, 1.0).to(dtype)


class IntegerLinear(nn.Module):
    """Rounds its inputs to 8-bit integers, multiplies integers, scales the sums."""

    def __init__(self, weight: Integers, bias: nn.Parameter | None, input_scale: Tensor | None) -> None:
        """Take a weight [O, I], symmetric, of one scale a row, and bias [O] or None.

        `input_scale` [1] is that of all inputs; None takes each token's largest magnitude over 127.
        """
        super().__init__()
        self.values, self.scales = nn.Buffer(weight.values), nn.Buffer(weight.scales.float())
        self.bias = bias
        self.input_scale = None if input_scale is None else nn.Buffer(input_scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        rows = inputs.flatten(0, -2).float()
        scale = token_scales(rows) if self.input_scale is None else self.input_scale
        # By the reciprocal, as engines do: a quotient would round some ties the other way.
        sums = product((rows * scale.reciprocal()).round().clamp(-HIGH - 1, HIGH), self.values)
        outputs: Tensor = (sums * scale * self.scales.T).to(inputs.dtype).unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias


def token_scales(rows: Tensor) -> Tensor:
    """[N, I] to [N, 1], by which a token's largest magnitude becomes 127; 1 for zeros, NaN where it holds NaN."""
    scales = rows.abs().amax(-1, keepdim=True) / HIGH
    return torch.where(scales == 0, 1.0, scales)


FLOAT_HIGH = 448.0


class Float8Linear(nn.Module):
    """Rounds its inputs to e4m3 with a scale a token, multiplies, and adds up in float32."""

    def __init__(self, values: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        """Take a quantized weight: values [O, I] float8, scales [O, 1], bias [O] or None."""
        super().__init__()
        self.values, self.scales, self.bias = nn.Buffer(values), nn.Buffer(scales.float()), bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        values, scales = to_float8(inputs.float())
        outputs = (values.float() @ self.values.float().T * scales * self.scales.T).to(inputs.dtype)
        return outputs if self.bias is None else outputs + self.bias


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest, ties to even: [..., I] to float8 values of that shape and scales [..., 1]."""
    scales = rows.abs().amax(-1, keepdim=True) / FLOAT_HIGH
    scales = torch.where(scales > 0, scales, 1.0)
    return (rows / scales).clamp(-FLOAT_HIGH, FLOAT_HIGH).to(torch.float8_e4m3fn), scales
