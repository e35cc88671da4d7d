"""W8A8 with scales of activations taken on the fly: int8 weights with a scale a row, int8 inputs with a scale a token.

x · Wᵀ ≈ (s_x · s_wᵀ) ∘ (X₈ · W₈ᵀ), the sum over integers exact, s = largest magnitude / 127. A scale a token needs no
calibration and follows each token's range, at the price of a pass over the inputs.
"""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

from models import compressed
from models.layers import integers
from models.layers.integer_linear import IntegerLinear
from models.layers.linears import linears, replace
from models.params import BaseParams
from models.quantize import Quantized, assemble, check

PAPER = "arXiv:2004.09602, sections 3 and 4"
CALIBRATED = False
STORED = compressed.INTEGER


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["int8_dynamic"] = "int8_dynamic"


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put integer layers in place of the linear ones of the decoder blocks.

    Args:
        model: in float32; used up.
        documents: not read.
        params: nothing to set.

    Raises:
        ValueError: a layer can't be handled; names it.
    """
    check(model)
    rounded = {name: integers.quantize(layer.weight, 8, None, symmetric=True) for name, layer in linears(model)}
    replace(model, lambda name, layer: IntegerLinear(rounded[name], layer.bias, input_scale=None))
    parts = {name: compressed.plain_parts(weight.values, weight.scales) for name, weight in rounded.items()}
    return assemble(model, parts, compressed.plain_scheme(STORED, dynamic=True))
