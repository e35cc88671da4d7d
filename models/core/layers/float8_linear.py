"""A linear layer of 8-bit float (e4m3) weights and inputs."""

import torch
from torch import Tensor, nn

HIGH = 448.0


class Float8Linear(nn.Module):
    """Rounds its inputs to e4m3 with a scale a token, multiplies, and adds up in float32.

    Letters: O outputs and I inputs, N tokens.
    """

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
    scales = rows.abs().amax(-1, keepdim=True) / HIGH
    scales = torch.where(scales > 0, scales, 1.0)
    return (rows / scales).clamp(-HIGH, HIGH).to(torch.float8_e4m3fn), scales
