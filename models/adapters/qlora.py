"""QLoRA: LoRA on a base whose linear layers are NF4 (`models.core.layers.normal_float`), frozen.

Base weights take 4.127 bits instead of 32. Gradients pass through them to the low-rank parts, for which they are
dequantized once more. Embedding, output matrix and norms stay as they are; at small sizes they are most of the model
(SmolLM2-135M: 28 of 135 M parameters). The model starts as the quantized base, which is worse than the base.

The paper pages the optimizer's state, 8 bytes for each trained parameter, which here regime `paged_state` does, in
`[finetune]` too. The paper computes in bfloat16; here in the format of the activations.

Adapters sit on all linear layers, which the paper finds is needed; rank 64 and alpha 16 are its too. Merged, each
matrix is the dequantized one plus its product: a model in full precision that computes as this one did, not the
original base with an adapter.
"""

from typing import Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.core.layers.lora import insert_lora, plain_linear, replace_kind, take_out
from models.core.layers.normal_float import NormalFloatLinear
from models.params import BaseParams

PAPER = "arXiv:2305.14314, section 3; rank and alpha of its section 4"
LEARNING_RATE = 1e-3


class Params(BaseParams):
    """Settings.

    Attributes:
        rank: r.
        alpha: the product is scaled by alpha / rank.
        layers: which linear layers of each block get a low-rank part, by the last part of their names; None all. All
            are quantized.
    """

    name: Literal["qlora"] = "qlora"
    rank: int = Field(64, ge=1)
    alpha: float = Field(16.0, gt=0)
    layers: tuple[str, ...] | None = Field(None, min_length=1)


CORNERS = (Params(layers=("o_proj", "down_proj")),)


def insert(model: PreTrainedModel, params: Params, rng: torch.Generator) -> None:
    """Quantize the base and put low-rank parts beside it; see `models.adapters`. ValueError if the model has no such
    layer, or the rank is more than a layer's smaller side."""
    names = params.layers or sorted({name.rpartition(".")[2] for name, _ in linears(model)})
    insert_lora(model, names, params.rank, params.alpha, rng, NormalFloatLinear)


def fold(model: PreTrainedModel) -> None:
    """Dequantize each matrix and add its product; see `models.adapters`."""
    take_out(model)
    replace_kind(model, NormalFloatLinear, lambda layer: plain_linear(layer.weight, layer.bias))
