"""Depth: whole blocks are left out, the rest stays as it is and is not trained again.

"influence" leaves out the blocks that turn the residual stream least: block influence is 1 − cos(x, y), x what a block
reads and y what it hands on, both with the residual and before any norm, mean over all tokens. It is measured once with
all blocks in place. "spread" reads no data and keeps blocks evenly spread from the first to the last, as DistilBERT
starts.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.core.layers.reshape import spread_layers, take_layers
from models.params import TrainingParams, unread
from models.shrink import Measured, choose, pieces, read, shape_of

PAPER = "arXiv:2403.03853, equation 1; arXiv:1910.01108, section 3"
KEEPS_TOKENS = True


class Params(Measured):
    """How many blocks stay, and which."""

    name: Literal["depth"] = "depth"
    num_layers: int = Field(ge=1, description="blocks that stay.")
    keep: Literal["influence", "spread"] = Field(
        "influence", description='"influence" keeps those that change the states most, "spread" those evenly spaced.'
    )

    @property
    def measures(self) -> bool:
        return self.keep == "influence"

    _documents = unread("num_documents", when=lambda params: not params.measures, why='keep is "spread"')


CORNERS = (Params(num_layers=1), Params(num_layers=1, keep="spread"))


def shrink(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params, training: TrainingParams, seed: int = 0
) -> PreTrainedModel:
    """Return a model of fewer blocks; see `models.shrink`."""
    num_layers = shape_of(model).num_layers
    if params.num_layers >= num_layers:
        raise ValueError(f"num_layers must be 1 to {num_layers - 1}, less than the model's; got {params.num_layers}")
    if params.keep == "spread":
        return take_layers(model, spread_layers(num_layers, params.num_layers))
    scores = influence(model, pieces(documents, params, training, seed))
    return take_layers(model, choose(scores, params.num_layers).tolist())


def influence(model: PreTrainedModel, documents: Sequence[Sequence[int]]) -> Tensor:
    """Return [L] the influence of each block, 0 to 2; documents are token ids."""
    sums, num_tokens = torch.zeros(len(blocks(model)), dtype=torch.float64), sum(map(len, documents))

    def add(number: int, read: Tensor, handed_on: Tensor | tuple[Tensor, ...]) -> None:
        after = handed_on if isinstance(handed_on, Tensor) else handed_on[0]
        cosine = nn.functional.cosine_similarity(read.float(), after.float(), dim=-1)
        sums[number] += float((1 - cosine).sum())

    hooks = [
        block.register_forward_hook(lambda module, args, output, number=number: add(number, args[0], output))
        for number, block in enumerate(blocks(model))
    ]
    read(model, documents, hooks)
    return sums / num_tokens
