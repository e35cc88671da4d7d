"""NF4: 4-bit levels at quantiles of the normal distribution, and scales that are quantized themselves.

The form that QLoRA keeps a frozen base in; see `models.core.layers.normal_float`. A weight takes 4 bits, its share of a
block's 8-bit scale and of that one's scale: 4.127 bits with blocks of 64. The paper's 8-bit floats of scales are taken
to be e4m3; the authors' code has a format of its own there.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers import normal_float
from models.core.layers.normal_float import Scales
from models.params import BaseParams
from models.quantize import Quantized, assemble, check, round_each

PAPER = "arXiv:2305.14314, section 3"
CALIBRATED = False
STORED = None
ELSEWHERE = (
    'vLLM has it on GPUs alone, in a format of bitsandbytes; [finetune] method = { name = "qlora" } trains on it'
)


class Params(BaseParams):
    """The form of weights."""

    name: Literal["nf4"] = "nf4"
    group_size: Literal[32, 64, 128] = Field(64, description="weights of a row that share a scale.")
    double: bool = Field(True, description="whether scales are stored in 8 bits instead of 32.")


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round the weights of the decoder blocks; see `models.quantize`."""
    check(model, params.group_size)

    def code(name: str, layer: nn.Linear) -> tuple[Tensor, dict[str, Tensor]]:
        rounded = normal_float.encode(layer.weight, params.group_size, params.double)
        parts = {"weight_packed": normal_float.pack(rounded.codes)}
        if isinstance(rounded.scales, Scales):
            parts |= {
                "scale": rounded.scales.values,
                "scale_blocks": rounded.scales.blocks,
                "scale_mean": rounded.scales.mean,
            }
        else:
            parts["scale"] = rounded.scales
        return rounded.floats(), parts

    return assemble(model, round_each(model, code))
