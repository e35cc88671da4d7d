"""W8A8 with one fixed scale for all inputs of a layer, measured beforehand: nothing is left to do at run time.

x · Wᵀ ≈ s_x · s_wᵀ ∘ (X₈ · W₈ᵀ). s_x is a percentile of the magnitudes that calibration saw, over 127; larger inputs
are clipped. The default 100 clips nothing of the calibration text. Layers are calibrated block by block on the inputs
that come through the quantized ones before them. Layers that read the same inputs get the same scale, which engines
that multiply them as one matrix rely on.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.core.layers import integers
from models.core.layers.integers import HIGH, IntegerLinear
from models.core.layers.linears import Rows, calibrate, replace
from models.params import BaseParams
from models.quantize import Quantized, assemble, check, check_documents

PAPER = "arXiv:2004.09602, sections 3 and 5"
CALIBRATED = True
STORED = compressed.INTEGER


class Params(BaseParams):
    """Settings.

    Attributes:
        percentile: of the magnitudes of a layer's inputs, which becomes 127.
        weight_bits: 7 leaves the highest bit of int8 weights unused; see `int8_dynamic`.
    """

    name: Literal["int8_static"] = "int8_static"
    percentile: float = Field(100.0, ge=90, le=100)
    weight_bits: Literal[7, 8] = 8


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put integer layers in place of the linear ones of the decoder blocks; see `models.quantize`."""
    check(model)
    check_documents(documents)
    parts: dict[str, dict[str, Tensor]] = {}
    made: dict[str, IntegerLinear] = {}

    def visit(name: str, layer: nn.Linear, read: Rows) -> None:
        weight = integers.quantize(layer.weight, params.weight_bits, None, symmetric=True)
        scale = _scale(read.inputs, params.percentile)
        parts[name] = compressed.plain_parts(weight.values, weight.scales, scale)
        made[name] = IntegerLinear(weight, layer.bias, scale)
        # The next blocks are calibrated on what this layer is going to say.
        layer.forward = made[name].forward  # type: ignore[assignment, method-assign]  # it answers for what replaces it

    calibrate(model, documents, Rows, visit)
    replace(model, lambda name, layer: made[name])
    return assemble(model, parts, compressed.plain_scheme(STORED, dynamic=False))


def _scale(inputs: Tensor, percentile: float) -> Tensor:
    magnitudes = inputs.abs().flatten()
    rank = max(1, round(percentile / 100 * magnitudes.numel()))
    most = magnitudes.max() if rank == magnitudes.numel() else magnitudes.kthvalue(rank).values
    return torch.where(most > 0, most / HIGH, 1.0).reshape(1)
