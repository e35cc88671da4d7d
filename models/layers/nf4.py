"""NF4: weights in 4 bits whose 16 values are quantiles of a normal distribution, and constants quantized once more.

A weight is code · scale: scale is the largest magnitude of its block of 64, code the nearest of 16 values from −1 to 1.
The scales less their mean are kept in 8-bit floats, 256 of them to one float32 maximum. That makes
4 + 8/64 + 32/(64·256) = 4.127 bits a weight (QLoRA, arXiv:2305.14314, sections 3 and 3.1).

The paper says "FP8" and names no format. This is e4m3, scaled so that the largest scale of a block is 448, the format's
largest number. Codes are chosen with the exact scales, before these are quantized, as the paper's own code does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 64
SCALE_BLOCK = 256
FP8_MAX = 448.0

# arXiv:2305.14314, appendix E: quantiles of N(0, 1), seven below zero and eight above, divided by the largest.
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Nf4(NamedTuple):
    """A quantized tensor of n weights in b = ⌈n/64⌉ blocks.

    Attributes:
        codes: [⌈n/2⌉] uint8, two codes a byte, the first one in the high bits.
        scales: [b] uint8, the bits of 8-bit floats.
        maxima: [⌈b/256⌉] float32, what an 8-bit float of 448 stands for.
        mean: [] float32, what is added to each scale.
        shape: of the tensor.
    """

    codes: Tensor
    scales: Tensor
    maxima: Tensor
    mean: Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """What is stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self[:4])


def quantize(weight: Tensor) -> Nf4:
    """Quantize a tensor of any shape, read row by row.

    Raises:
        ValueError: it is empty, or holds NaN or infinite values.
    """
    if not weight.numel() or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"NF4 takes finite weights, at least one; got {list(weight.shape)} with NaN, infinite or none")
    blocks = _blocks(weight.detach().float().flatten(), BLOCK)
    scales = blocks.abs().amax(dim=1)
    codes = _nearest(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).flatten()[: weight.numel()]
    pairs = _blocks(codes, 2)
    mean = scales.mean()
    centred = _blocks(scales - mean, SCALE_BLOCK)
    maxima = centred.abs().amax(dim=1)
    small = centred / maxima.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * FP8_MAX
    return Nf4(
        codes=(pairs[:, 0] << 4) | pairs[:, 1],
        scales=small.flatten()[: len(scales)].to(torch.float8_e4m3fn).view(torch.uint8),
        maxima=maxima,
        mean=mean,
        shape=weight.shape,
    )


def dequantize(packed: Nf4) -> Tensor:
    """Return the weights in float32, in their shape."""
    small = _blocks(packed.scales.view(torch.float8_e4m3fn).float(), SCALE_BLOCK)
    scales = (small / FP8_MAX * packed.maxima[:, None]).flatten()[: len(packed.scales)] + packed.mean
    codes = torch.stack([packed.codes >> 4, packed.codes & 15], dim=1).flatten()[: packed.shape.numel()]
    values = torch.tensor(CODES, device=codes.device)[codes.int()]
    return (_blocks(values, BLOCK) * scales[:, None]).flatten()[: packed.shape.numel()].view(packed.shape)


class Nf4Linear(nn.Module):
    """A linear layer whose weight is NF4 and never trained; gradients pass through to its input.

    The weight is dequantized for each product, in the backward pass once more, so that no copy in full precision
    outlives the product and nothing but the packed weight is kept for the backward pass.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed = quantize(layer.weight)
        self.shape, self.dtype = packed.shape, layer.weight.dtype
        for name in ("codes", "scales", "maxima", "mean"):
            self.register_buffer(name, getattr(packed, name))
        self.bias = layer.bias

    @property
    def packed(self) -> Nf4:
        """The weight [O, I] as it is stored."""
        return Nf4(self.codes, self.scales, self.maxima, self.mean, self.shape)

    @property
    def weight(self) -> Tensor:
        """[O, I] dequantized, in the format of the layer that was packed."""
        return dequantize(self.packed).to(self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        outputs: Tensor = _Product.apply(inputs, self.packed)
        return outputs if self.bias is None else outputs + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Nf4) -> Tensor:
        ctx.packed = packed
        return inputs @ dequantize(packed).to(inputs.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantize(ctx.packed).to(grad.dtype), None


def _nearest(values: Tensor) -> Tensor:
    """Return the index of the nearest of `CODES`, as uint8."""
    codes = torch.tensor(CODES, device=values.device)
    return torch.bucketize(values, (codes[1:] + codes[:-1]) / 2).to(torch.uint8)


def _blocks(flat: Tensor, size: int) -> Tensor:
    """[n] → [⌈n/size⌉, size], filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
