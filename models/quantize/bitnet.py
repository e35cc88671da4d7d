"""BitNet: weights of −1, 0 and 1 (b1.58) or of −1 and 1 (BitNet), inputs of 8 bits, for models trained that way.

A layer computes y = γ · s_x · (X₈ · W̃ᵀ). Ternary: γ = mean |W|, W̃ = round(W / γ) clipped to −1 … 1. Binary:
γ = mean |W|, W̃ = sign(W − mean W), where sign(0) is 1. X₈ are a token's inputs with its largest magnitude at 127; the
1-bit paper takes one scale for the whole batch in training and one a token afterwards, here it is one a token always.

Both papers normalise a layer's inputs before rounding, b1.58 by an RMSNorm inside of the layer. Here it has no weights
(`norm`), so that the checkpoint keeps Llama's names; the block's own norms stay too.

The model is trained from scratch under `Hooks`: weights stay floats, the forward pass rounds them, and gradients pass
straight through both roundings. `quantize` on a model that was not trained so gives one that says nothing of use.
Five ternary weights share a byte (3⁵ = 243): 1.6 bits a weight; eight binary ones do.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.integers import HIGH, product, token_scales
from models.core.layers.linears import linears, replace
from models.params import BaseParams
from models.quantize import Quantized, Rounding, assemble, check

PAPER = "arXiv:2402.17764, section 2; arXiv:2310.11453, section 2.1"
CALIBRATED = False
STORED = None
ELSEWHERE = "vLLM has no layer for it; redraft compare quantize trains and measures it from nothing"
_EPSILON = 1e-5


class Params(BaseParams):
    """The form of weights and layers."""

    name: Literal["bitnet"] = "bitnet"
    weights: Literal["ternary", "binary"] = Field("ternary", description="of three values or of two.")
    norm: bool = Field(True, description="whether an RMSNorm without weights comes before each layer.")


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put layers of few-valued weights in place of the linear ones of the decoder blocks; see `models.quantize`."""
    check(model)
    made = {name: _Linear(layer, params) for name, layer in linears(model)}
    parts = {n: {"weight_packed": pack(m.values, params.weights), "weight_scale": m.scale} for n, m in made.items()}
    replace(model, lambda name, layer: made[name])
    return assemble(model, parts)


class Hooks(Rounding):
    params: Params

    def forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        rows = _norm(inputs) if self.params.norm else inputs
        with torch.no_grad():
            values, scale = few_valued(layer.weight, self.params)
            wrong_weight = values * scale - layer.weight
            scales = token_scales(rows)
            wrong_rows = (rows / scales).round() * scales - rows
        return functional.linear(rows + wrong_rows, layer.weight + wrong_weight, layer.bias)


class _Linear(nn.Module):
    def __init__(self, layer: nn.Linear, params: Params) -> None:
        super().__init__()
        values, scale = few_valued(layer.weight.detach(), params)
        self.values, self.scale = nn.Buffer(values.to(torch.int8)), nn.Buffer(scale)
        self.bias, self.norm = layer.bias, params.norm

    def forward(self, inputs: Tensor) -> Tensor:
        rows = _norm(inputs) if self.norm else inputs
        rows = rows.flatten(0, -2).float()
        scales = token_scales(rows)
        outputs: Tensor = product((rows / scales).round().clamp(-HIGH, HIGH), self.values) * scales * self.scale
        outputs = outputs.to(inputs.dtype).unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias


def few_valued(weight: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """Return what stands for a weight: values [O, I] of −1, (0) and 1, and their scale [1], in float32."""
    weight = weight.float()
    scale = weight.abs().mean().reshape(1)
    if params.weights == "binary":
        return torch.where(weight >= weight.mean(), 1.0, -1.0), scale
    return (weight / (scale + _EPSILON)).round().clamp(-1, 1), scale


def pack(values: Tensor, weights: Literal["ternary", "binary"]) -> Tensor:
    """Put five ternary or eight binary values into a byte (uint8), the first counting most, −1 where none is left."""
    digits, base, each = (values + 1, 3, 5) if weights == "ternary" else ((values + 1) // 2, 2, 8)
    digits = functional.pad(digits.flatten().long(), (0, -digits.numel() % each)).view(-1, each)
    counts = base ** torch.arange(each - 1, -1, -1, device=digits.device)
    return (digits * counts).sum(1).to(torch.uint8)


def _norm(inputs: Tensor) -> Tensor:
    return functional.rms_norm(inputs, inputs.shape[-1:], eps=_EPSILON)
