"""Round to nearest: each weight to the closest of 2^bits levels of its group. The baseline of the 4-bit methods.

Nothing is calibrated. Scales are stored in bfloat16 and weights are rounded on the stored scale, so that the file says
exactly what was computed.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.checkpoints import compressed
from models.layers import integers
from models.params import BaseParams
from models.quantize import Quantized, assemble, check, round_each

PAPER = "arXiv:2103.13630, sections III.B and III.E"
CALIBRATED = False
STORED = compressed.PACKED


class Params(BaseParams):
    """Settings.

    Attributes:
        bits: of a weight; engines serve 4, and 8 on GPUs.
        group_size: weights of a row that share a scale.
        symmetric: whether 0 is the middle of the grid; else each group has a zero point.
    """

    name: Literal["rtn"] = "rtn"
    bits: int = Field(4, ge=2, le=8)
    group_size: Literal[32, 64, 128] = 128
    symmetric: bool = True


CORNERS = (Params(group_size=32, symmetric=False),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round the weights of the decoder blocks.

    Args:
        model: in float32; used up.
        documents: not read.
        params: the grid.

    Raises:
        ValueError: a layer can't be handled, or groups don't fill its rows; names it.
    """
    check(model, params.group_size)

    def code(name: str, layer: nn.Linear) -> tuple[Tensor, dict[str, Tensor]]:
        rounded = integers.quantize(layer.weight, params.bits, params.group_size, params.symmetric, torch.bfloat16)
        return rounded.floats(), compressed.packed_parts(rounded, params.bits)

    parts = round_each(model, code)
    return assemble(model, parts, compressed.packed_scheme(params.bits, params.group_size, params.symmetric))
