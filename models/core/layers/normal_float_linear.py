"""A linear layer whose weight is kept in 4-bit NormalFloat and never trained; gradients pass through to its input.

The weight is dequantized for each product, in the backward pass once more, so that no copy in full precision outlives
the product and nothing but the packed weight is kept for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.core.layers import normal_float
from models.core.layers.normal_float import NormalFloats, Scales


class NormalFloatLinear(nn.Module):
    """Takes the place of a linear layer.

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
        rounded = normal_float.encode(layer.weight)
        assert isinstance(rounded.scales, Scales)
        self.register_buffer("codes", normal_float.pack(rounded.codes))
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
        return NormalFloats(normal_float.unpack(self.codes), scales).floats().to(self.dtype)

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
