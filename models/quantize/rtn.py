"""Round to nearest: each weight to the closest of 2^bits levels of its group. The baseline of the 4-bit methods.

Nothing is calibrated.
"""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.quantize import Grid, Quantized, round_to

PAPER = "arXiv:2103.13630, sections III.B and III.E"
CALIBRATED = False
STORED = compressed.PACKED


class Params(Grid):
    """The grid."""

    name: Literal["rtn"] = "rtn"


CORNERS = (Params(group_size=32, symmetric=False),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round the weights of the decoder blocks; see `models.quantize`."""
    return round_to(model, params)
