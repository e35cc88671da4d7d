"""W8A8 with scales of activations taken on the fly: int8 weights with a scale a row, int8 inputs with a scale a token.

x · Wᵀ ≈ (s_x · s_wᵀ) ∘ (X₈ · W₈ᵀ), the sum over integers exact, s = largest magnitude / 127.

A CPU without VNNI instructions adds pairs of products in 16 bits, which saturate when weights exceed 63; on such a
machine the engine refuses weights of 8 bits, and 7 are served exactly.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.core.layers import integers
from models.core.layers.integers import IntegerLinear
from models.core.layers.linears import linears, replace
from models.params import BaseParams
from models.quantize import Quantized, assemble, check

PAPER = "arXiv:2004.09602, sections 3 and 4"
CALIBRATED = False
STORED = compressed.INTEGER


class Params(BaseParams):
    """The form of weights."""

    name: Literal["int8_dynamic"] = "int8_dynamic"
    weight_bits: Literal[7, 8] = Field(
        8, description="7 leaves the highest bit of int8 weights unused; see the module."
    )


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put integer layers in place of the linear ones of the decoder blocks; see `models.quantize`."""
    check(model)
    rounded = {
        name: integers.quantize(layer.weight, params.weight_bits, None, symmetric=True)
        for name, layer in linears(model)
    }
    replace(model, lambda name, layer: IntegerLinear(rounded[name], layer.bias, input_scale=None))
    parts = {name: compressed.plain_parts(weight.values, weight.scales) for name, weight in rounded.items()}
    return assemble(model, parts, compressed.plain_scheme(STORED, dynamic=True))
