"""The last blocks alone, as they are: the baseline of the others.

Nothing is put in, so what is saved are whole blocks. The gradient ends at the first trained one: the blocks before it
keep nothing for the backward pass, and need none. Final norm and output matrix stay; the latter is often the embedding.
"""

from typing import Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.params import BaseParams

PAPER = "none: the usual baseline, such as in arXiv:1902.00751, section 3.3"
LEARNING_RATE = 3e-4


class Params(BaseParams):
    """How much is trained."""

    name: Literal["last_layers"] = "last_layers"
    num_layers: int = Field(2, ge=1, description="blocks that are trained, counted from the end.")


CORNERS = (Params(num_layers=1),)


def insert(model: PreTrainedModel, params: Params, rng: torch.Generator) -> None:
    """Let the last blocks be trained; see `models.adapters`. ValueError if the model has fewer blocks."""
    layers = blocks(model)
    if params.num_layers > len(layers):
        raise ValueError(f"num_layers must be at most {len(layers)}, the model's; got {params.num_layers}")
    for block in layers[-params.num_layers :]:
        block.requires_grad_(True)


def fold(model: PreTrainedModel) -> None:
    """Leave the model as it is; see `models.adapters`."""
