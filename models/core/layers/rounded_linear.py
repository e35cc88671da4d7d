"""Linear layers of 8-bit weights and inputs: integers, or floats (e4m3). O outputs and I inputs, N tokens."""

import torch
from torch import Tensor, nn

from models.core.layers.integers import Integers, product

HIGH = 127


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
