"""Quantization-aware training: the model is trained with rounded weights, and gradients pass rounding as if not there.

w̃ = w + (round(w) − w) with the bracket's gradient left out (straight-through). The grid is that of `rtn`, fitted anew
in every step, so nothing is clipped and no gradient is cut. Training starts from a trained model and is `regime`'s;
`quantize` rounds what came out of it, and without training before is rounding to nearest.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.checkpoints import compressed
from models.layers import integers
from models.layers.integers import Integers
from models.layers.linears import linears
from models.params import BaseParams
from models.quantize import Quantized, assemble, check, round_each
from models.regimes import Plan, Regime

PAPER = "arXiv:1712.05877, section 3; arXiv:1308.3432 (straight-through)"
CALIBRATED = False
STORED = compressed.PACKED


class Params(BaseParams):
    """Settings.

    Attributes:
        bits: of a weight; engines serve 4, and 8 on GPUs.
        group_size: weights of a row that share a scale.
        symmetric: whether 0 is the middle of the grid; else each group has a zero point.
    """

    name: Literal["qat"] = "qat"
    bits: int = Field(4, ge=2, le=8)
    group_size: Literal[32, 64, 128] = 128
    symmetric: bool = True


CORNERS = (Params(group_size=32, symmetric=False),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round the weights of the decoder blocks as training did.

    Args:
        model: in float32, trained under `regime`; used up.
        documents: not read.
        params: the grid, as in training.

    Raises:
        ValueError: a layer can't be handled, or groups don't fill its rows; names it.
    """
    check(model, params.group_size)

    def code(name: str, layer: nn.Linear) -> tuple[Tensor, dict[str, Tensor]]:
        rounded = _round(layer.weight, params)
        return rounded.floats(), compressed.packed_parts(rounded, params.bits)

    parts = round_each(model, code)
    return assemble(model, parts, compressed.packed_scheme(params.bits, params.group_size, params.symmetric))


def regime(params: Params, rng: torch.Generator) -> Regime:
    """Return hooks under which the model computes with rounded weights.

    Nothing is drawn from `rng`. The hooks' `start` raises ValueError as `quantize` does.
    """
    return _Rounded(params)


class _Rounded(Regime):
    def __init__(self, params: Params) -> None:
        self.params = params

    def start(self, model: PreTrainedModel, plan: Plan) -> list[nn.Parameter]:
        check(model, self.params.group_size)
        for _, layer in linears(model):
            layer.forward = _forward(layer, self.params)  # type: ignore[assignment, method-assign]  # until `finish`
        return []

    def finish(self, model: PreTrainedModel) -> None:
        for _, layer in linears(model):
            del layer.forward


def _forward(layer: nn.Linear, params: Params) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wrong = _round(layer.weight, params).floats() - layer.weight
        return functional.linear(inputs, layer.weight + wrong, layer.bias)

    return forward


def _round(weight: Tensor, params: Params) -> Integers:
    return integers.quantize(weight, params.bits, params.group_size, params.symmetric, torch.bfloat16)
