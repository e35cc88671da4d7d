"""FP8 (e4m3) weights with a scale a row and inputs with a scale a token: largest magnitude / 448.

Rounding is exact: to the nearest of the numbers with 4 exponent and 3 mantissa bits, ties to even, subnormal numbers
included. Sums are taken in float32; tensor cores add with fewer bits, so a GPU's outputs differ in their last places.
The stored checkpoint needs a GPU with FP8 units (or a CPU with AMX) to be served, where it also runs faster; here it is
simulated, at no gain in speed.
"""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.core.layers.integers import Float8Linear, to_float8
from models.core.layers.linears import linears, replace
from models.params import BaseParams
from models.quantize import Quantized, assemble, check

PAPER = "arXiv:2209.05433, sections 3 and 4"
CALIBRATED = False
STORED = compressed.FLOAT


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["fp8"] = "fp8"


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Put FP8 layers in place of the linear ones of the decoder blocks; see `models.quantize`."""
    check(model)
    rounded = {name: to_float8(layer.weight.detach()) for name, layer in linears(model)}
    replace(model, lambda name, layer: Float8Linear(*rounded[name], layer.bias))
    parts = {name: compressed.plain_parts(*pair) for name, pair in rounded.items()}
    return assemble(model, parts, compressed.plain_scheme(STORED, dynamic=True))
