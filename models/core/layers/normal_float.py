"""4-bit NormalFloat: 16 levels that weights of a normal distribution fall into equally often, and double quantization.

Letters: O outputs and I inputs of a layer, S blocks of a matrix.

The levels are means of neighbouring quantiles, computed apart for the two halves of the normal distribution, so that 0
is one of them (arXiv:2305.14314, section 3): 8 levels above 0, 7 below, scaled to −1 … 1. The outermost quantile, at
which a distribution without end must be cut, is the authors': the mean of 1 − 1/32 and 1 − 1/30.

Double quantization stores a block's scale in 8 bits: the scales' mean is taken off, then blocks of 256 of them are
stored as 8-bit floats (e4m3) with a float32 scale each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.core.layers.integers import to_float8

OUTERMOST = 1 - (1 / 32 + 1 / 30) / 2
SCALE_BLOCK = 256


class Scales(NamedTuple):
    """Doubly quantized scales: `values` [S] float8, `blocks` [S / 256, rounded up] float32, `mean` [1] float32."""

    values: Tensor
    blocks: Tensor
    mean: Tensor

    def floats(self) -> Tensor:
        """[S] float32, not below 0."""
        spread = self.blocks.repeat_interleave(SCALE_BLOCK)[: len(self.values)]
        return (self.values.float() * spread + self.mean).clamp(min=0)


class NormalFloats(NamedTuple):
    """A quantized matrix: [O, I] uint8 numbers of levels, and the scales of blocks of a row, one after the other."""

    codes: Tensor
    scales: Tensor | Scales

    def floats(self) -> Tensor:
        """Return what the codes stand for, [O, I] float32."""
        scales = self.scales.floats() if isinstance(self.scales, Scales) else self.scales
        values = levels().to(self.codes.device)[self.codes.long()]
        return (values.view(len(scales), -1) * scales[:, None]).view(self.codes.shape)


def levels() -> Tensor:
    """Return the 16 levels, [16] float32, ascending."""
    positive = _quantiles(9)
    negative = -_quantiles(8)
    book = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return (book / book.max()).float()


def encode(weight: Tensor, block_size: int = 64, double: bool = True) -> NormalFloats:
    """Round each weight [O, I] to the nearest level of its block, `block_size` of a row, scaled by the largest.

    With `double` scales are quantized too; weights are rounded by the scales as they were before. ValueError if the
    blocks don't fill the rows.
    """
    if weight.shape[1] % block_size:
        raise ValueError(f"block_size {block_size} does not divide a width of {weight.shape[1]}")
    blocks = weight.detach().float().reshape(-1, block_size)
    scales = blocks.abs().amax(1)
    book = levels().to(weight.device)
    middles = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], middles)
    return NormalFloats(codes.to(torch.uint8).view(weight.shape), _double(scales) if double else scales)


def pack(codes: Tensor) -> Tensor:
    """Put two codes into a byte, the first in the high bits; [..., I] uint8 to [..., I / 2] uint8, I even."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] << 4) | pairs[..., 1]


def unpack(words: Tensor) -> Tensor:
    """Take codes out again: the inverse of `pack`."""
    return torch.stack([words >> 4, words & 15], -1).flatten(-2)


def _quantiles(count: int) -> Tensor:
    """Return the normal distribution's quantiles from OUTERMOST down to, and without, the one half."""
    quantiles: Tensor = torch.special.ndtri(torch.linspace(OUTERMOST, 0.5, count, dtype=torch.float64))
    return quantiles[:-1]


def _double(scales: Tensor) -> Scales:
    mean = scales.mean().reshape(1)
    padded = torch.nn.functional.pad(scales - mean, (0, -len(scales) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    values, blocks = to_float8(padded)
    return Scales(values.flatten()[: len(scales)], blocks[:, 0], mean)


class NormalFloatLinear(nn.Module):
    """Takes the place of a linear layer; its weight is never trained, and gradients pass through to its input.

    The weight is dequantized for each product, in the backward pass once more, so that no copy in full precision
    outlives the product and nothing but the packed weight is kept for the backward pass.

    Letters: O outputs and I inputs of the layer.

    Attributes:
        multiply: how inputs [..., I] and the weight are multiplied in training; None for the plain product.
    """

    multiply: Callable[[Tensor, Tensor], Tensor] | None = None
    codes: Tensor
    scale_values: Tensor
    scale_blocks: Tensor
    scale_mean: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        """Round a layer's weight; its bias is shared; ValueError if blocks of 64 don't fill the rows."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        rounded = encode(layer.weight)
        assert isinstance(rounded.scales, Scales)
        self.register_buffer("codes", pack(rounded.codes))
        for name, part in rounded.scales._asdict().items():
            self.register_buffer(f"scale_{name}", part)
        self.bias = layer.bias

    @property
    def num_bytes(self) -> int:
        """What the weight takes."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def weight(self) -> Tensor:
        """[O, I] dequantized, in the format of the layer that was rounded."""
        scales = Scales(self.scale_values, self.scale_blocks, self.scale_mean)
        return NormalFloats(unpack(self.codes), scales).floats().to(self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        outputs: Tensor
        if self.training and self.multiply is not None:
            outputs = self.multiply(inputs, self.weight)
        else:
            outputs = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]  # torch's own, without types
        return outputs if self.bias is None else outputs + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: NormalFloatLinear) -> Tensor:
        ctx.layer = layer
        return inputs @ layer.weight.to(inputs.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None
