"""Linear layers that draft and are trained no more: their products of few rows, in the format that multiplies fastest.

Beside a target in bfloat16 that is int8 where the processor has a kernel for it: drafted tokens are verified, so what
rounding costs is a few of them. What a layer reads and puts out keeps its format, so that norms, attention and sums are
as exact as in training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.core.layers.packed_product import int8_product, product, takes_int8


class Borrowed(nn.Module):
    """A linear layer with somebody else's matrix: read, never trained, and no part of a state dict.

    Attributes:
        weight: [O, I].
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        return functional.linear(x, self.weight)


def pack(module: nn.Module, dtype: torch.dtype, unrounded: Sequence[nn.Module] = ()) -> None:
    """Let all linear layers of a module multiply in `dtype`, or in int8 instead of bfloat16, by matrices packed now.

    Weights keep their names, values and format, and are not read again: what they learn later, and where they are
    moved, changes no product. Layers that are `unrounded` are not multiplied in int8.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Borrowed) and layer.weight.numel():
            rounded = dtype == torch.bfloat16 and layer not in unrounded and takes_int8(layer.weight)
            # With another module in its place, names of parameters would change.
            layer.forward = _Packed(layer, dtype, rounded)  # type: ignore[method-assign]  # an instance's own


class _Packed:
    def __init__(self, layer: nn.Linear | Borrowed, dtype: torch.dtype, rounded: bool) -> None:
        weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
        self._multiply, self._dtype = int8_product(weight) if rounded else product(weight.to(dtype)), dtype
        self._bias = None if bias is None else bias.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x.to(self._dtype), self._bias).to(x.dtype)
