"""LLM.int8(): integer products with a scale a row and a column, and 16-bit products for the few outlier features.

Σ over outlier features O of x_h · w_h in 16 bits, plus the integer product of the rest. O are the features in which a
token's magnitude reaches the threshold (6.0); a few of them carry magnitudes that would leave all others no levels.
Rounding on the way to integers is one of the paper's Table 1: `scheme` absmax (0 is the middle) or zeropoint (the range
from the least to the largest value, 0 included), `granularity` tensor (one scale a matrix), row (inputs have one a
token) or vector (weights have one an output too).

The paper keeps all weights in 16 bits beside the integers. Here a weight takes one byte: only columns of features that
are outliers of the calibration text are kept in float16, and those that first turn up later are read back from their
integers. O is looked for in all tokens of a call, padding included.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.integers import product
from models.core.layers.linears import Rows, calibrate, linears, replace
from models.params import BaseParams, unread
from models.quantize import Quantized, assemble, check, check_documents

PAPER = "arXiv:2208.07339, sections 2 and 3"
CALIBRATED = True
STORED = None
ELSEWHERE = "vLLM has it on GPUs alone, in a format of bitsandbytes; int8_dynamic is served everywhere"
HIGH = 127
Scheme = Literal["absmax", "zeropoint"]


class Params(BaseParams):
    """Settings."""

    name: Literal["llm_int8"] = "llm_int8"
    scheme: Scheme = Field("absmax", description="where the integers lie.")
    granularity: Literal["tensor", "row", "vector"] = Field("vector", description="what shares a scale.")
    decompose: bool = Field(True, description="whether outlier features are multiplied in 16 bits.")
    threshold: float = Field(6.0, gt=0, description="magnitude from which a feature is an outlier.")
    _outliers = unread("threshold", when=lambda params: not params.decompose, why="decompose is false")


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put mixed layers in place of the linear ones; without `decompose` no text is read; see `models.quantize`."""
    check(model)
    columns = {name: torch.empty(0, dtype=torch.int64, device=layer.weight.device) for name, layer in linears(model)}
    if params.decompose:
        check_documents(documents)

        def find(name: str, layer: nn.Linear, read: Rows) -> None:
            columns[name] = _outliers(read.inputs, params.threshold).nonzero()[:, 0]

        calibrate(model, documents, Rows, find)
    made = {name: _Linear(layer, columns[name], params) for name, layer in linears(model)}
    share = sum(len(found) / made[name].values.shape[1] for name, found in columns.items()) / len(columns)
    replace(model, lambda name, layer: made[name])
    return assemble(model, {name: layer.stored() for name, layer in made.items()}, figures={"outlier_features": share})


class _Codes(NamedTuple):
    """Whole numbers from −127 to 127 that stand for (value − zero) · scale; a scale and a zero a row, or one in all."""

    values: Tensor
    scale: Tensor
    zero: Tensor

    def floats(self) -> Tensor:
        return (self.values.float() - self.zero) * self.scale


class _Linear(nn.Module):
    def __init__(self, layer: nn.Linear, columns: Tensor, params: Params) -> None:
        super().__init__()
        self.params, self.bias = params, layer.bias
        weight = layer.weight.detach()
        kept = weight[:, columns].half()
        codes = _encode(weight.index_fill(1, columns, 0), params.scheme, by_row=params.granularity == "vector")
        self.values, self.scale, self.zero = map(nn.Buffer, (codes.values.to(torch.int8), codes.scale, codes.zero))
        self.columns, self.kept = nn.Buffer(columns.to(torch.int32)), nn.Buffer(kept)
        halves = codes.floats().half()
        halves[:, columns] = kept
        self.halves = nn.Buffer(halves, persistent=False)

    def stored(self) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {"weight": self.values, "weight_scale": self.scale}
        if self.params.scheme == "zeropoint":
            parts["weight_zero_point"] = self.zero.to(torch.int8)
        if len(self.columns):
            parts |= {"outlier_columns": self.columns, "outlier_weight": self.kept}
        return parts

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, -2).float()
        outlier = torch.zeros(rows.shape[1], dtype=torch.bool, device=rows.device)
        if self.params.decompose:
            outlier = _outliers(rows, self.params.threshold)
            outlier[self.columns] = True
        codes = _encode(rows.masked_fill(outlier, 0), self.params.scheme, by_row=self.params.granularity != "tensor")
        outputs: Tensor = _multiply(codes, _Codes(self.values, self.scale, self.zero))
        outputs = outputs + rows[:, outlier].half().float() @ self.halves[:, outlier].float().T
        outputs = outputs.to(inputs.dtype).unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias


def _outliers(rows: Tensor, threshold: float) -> Tensor:
    return (rows.abs() >= threshold).any(0)


def _encode(rows: Tensor, scheme: Scheme, by_row: bool) -> _Codes:
    parts = rows if by_row else rows.reshape(1, -1)
    if scheme == "absmax":
        scale = parts.abs().amax(-1, keepdim=True) / HIGH
        scale = torch.where(scale > 0, scale, 1.0)
        return _Codes((rows / scale).round(), scale, torch.zeros_like(scale))
    low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / (2 * HIGH)
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-HIGH - low / scale).round()
    return _Codes(((rows / scale).round() + zero).clamp(-HIGH, HIGH), scale, zero)


def _multiply(inputs: _Codes, weight: _Codes) -> Tensor:
    """Multiply as integers: Σ (x − z_x)(w − z_w) = Σ x·w − z_x Σ w − z_w Σ x + I·z_x·z_w, then scale; [N, O]."""
    sums = product(inputs.values, weight.values)
    if inputs.zero.any() or weight.zero.any():
        columns, rows = weight.values.double().sum(1)[None], inputs.values.double().sum(1, keepdim=True)
        zeros = inputs.zero.double(), weight.zero.double().T
        sums = sums - zeros[0] * columns - zeros[1] * rows + weight.values.shape[1] * zeros[0] * zeros[1]
    return sums.float() * inputs.scale * weight.scale.T
