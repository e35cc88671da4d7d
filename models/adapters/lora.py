"""LoRA: beside a frozen matrix W a trained product of two thin ones, W x + (α/r) B A x, merged into W afterwards.

The product is never formed in training. Of B sequences of L tokens and a matrix [E, E], x A and then B cost 2BLrE
multiplications forward, and as many for the gradient of the data and for that of the weights: 6BLrE, against 3BLE² for
training W itself. The passes through W, of which the gradient of the data still needs one, stay: 2BLE². So what LoRA
saves is the weight gradient and, above all, the optimizer's state.

The paper adapts the query and value projections only, which is the default here. B starts at zero, so the model starts
as its base; A is drawn uniformly within 1/√I, as `peft` does it, where the paper says Gaussian.

Merging adds in float64 and rounds once to W's format: in float32 logits move by some 1e-6 of their size, in float64 by
1e-14. Rounded to bfloat16 afterwards, a merged model loses updates under 1/256 of a weight, as any finetuned one does.

The layers are `peft`'s, put into the model without a model class around it; merging is done here, for the float64.
"""

from typing import Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from models.core.layers.lora import insert_lora, take_out
from models.params import BaseParams

PAPER = "arXiv:2106.09685, sections 4.1 and 4.2; rank and alpha of its table 9 for RoBERTa large"
LEARNING_RATE = 3e-3


class Params(BaseParams):
    """Settings.

    Attributes:
        rank: r.
        alpha: the product is scaled by alpha / rank.
        layers: which linear layers of each block, by the last part of their names.
    """

    name: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    layers: tuple[str, ...] = Field(("q_proj", "v_proj"), min_length=1)


CORNERS = (
    Params(layers=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    Params(layers=("o_proj", "down_proj")),
)


def insert(model: PreTrainedModel, params: Params, rng: torch.Generator) -> None:
    """Put a low-rank part beside each of `params.layers`; see `models.adapters`. ValueError if the model has no such
    layer, or the rank is more than a layer's smaller side."""
    insert_lora(model, params.layers, params.rank, params.alpha, rng)


def fold(model: PreTrainedModel) -> None:
    """Add each product to its matrix; see `models.adapters`."""
    take_out(model)
