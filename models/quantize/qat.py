"""Quantization-aware training: the model is trained with rounded weights, and gradients pass rounding as if not there.

w̃ = w + (round(w) − w) with the bracket's gradient left out (straight-through). The grid is that of `rtn`, fitted anew
in every step, so nothing is clipped and no gradient is cut. Training starts from a trained model, under `Hooks`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.quantize import Grid, Quantized, Rounding, round_to

PAPER = "arXiv:1712.05877, section 3; arXiv:1308.3432 (straight-through)"
CALIBRATED = False
STORED = compressed.PACKED


class Params(Grid):
    """The grid."""

    name: Literal["qat"] = "qat"


CORNERS = (Params(group_size=32, symmetric=False),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round the weights of the decoder blocks as training did; see `models.quantize`."""
    return round_to(model, params)


class Hooks(Rounding):
    params: Params

    def forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wrong = self.params.round(layer.weight).floats() - layer.weight
        return functional.linear(inputs, layer.weight + wrong, layer.bias)
