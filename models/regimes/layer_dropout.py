"""LayerSkip: blocks are dropped more often the deeper they are, and early layers learn to speak through the one head.

Block l of L is left out for a row with probability p_max · (e^(l·ln 2/(L−1)) − 1), nothing scaled. The loss of the exit
after block l, through the model's own last norm and output matrix, weighs e(l) = s · Σ_{i≤l} i, and the last layer's
L−1 + s · Σ_{i≤L−2} i. The paper divides by the sum of the weights; here they are divided by the last layer's, whose
loss the loop takes whole: the same direction of each gradient. At a step the exits l ≡ step (mod R) are trained (the
rotational curriculum), the last one always. The paper's growth of p over steps is for pretraining alone and left out.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.core.layers.partial import make_partial, make_whole
from models.params import BaseParams, unread
from models.regimes import Batch, Skipping

PAPER = "arXiv:2404.16710, section 4.1"
CHANGES = ("depth",)


class Params(BaseParams):
    """Strength of both parts."""

    name: Literal["layer_dropout"] = "layer_dropout"
    max_probability: float = Field(0.1, ge=0, lt=1, description="with which the last block is left out.")
    exit_scale: float = Field(0.2, ge=0, le=1, description="s; 0 trains no exits.")
    rotation: int = Field(2, ge=1, description="R, every how many steps an exit is trained.")
    _exits = unread("rotation", when=lambda params: not params.exit_scale, why="exit_scale is 0")


CORNERS = (Params(max_probability=0.9, rotation=1),)


def probabilities(num_layers: int, max_probability: float) -> Tensor:
    """Return with which probability each block is left out, [L]."""
    depth = torch.arange(num_layers) / (num_layers - 1)
    return max_probability * ((depth * math.log(2)).exp() - 1)


def exit_weights(num_layers: int, exit_scale: float) -> Tensor:
    """Return what the loss of each exit weighs, [L], the last one 1."""
    weights = exit_scale * torch.arange(num_layers).cumsum(0).double()
    weights[-1] = num_layers - 1 + exit_scale * sum(range(num_layers - 1))
    return weights / weights[-1]


class Hooks(Skipping):
    """Refuses a model of one block or not of Llama's layout."""

    params: Params

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        num_layers = len(blocks(model))
        if num_layers < 2:
            raise ValueError("layer_dropout takes a model of at least 2 blocks; got 1")
        self.probabilities = probabilities(num_layers, self.params.max_probability)
        self.weights = exit_weights(num_layers, self.params.exit_scale)
        make_partial(model, self._choose)
        self.exits: dict[int, Tensor] = {}
        self.handles = [
            block.register_forward_hook(lambda module, args, states, index=index: self._keep(module, index, states))
            for index, block in enumerate(blocks(model)[:-1])
        ]

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor | None:
        exits, self.exits = self.exits, {}
        losses = [
            self.weights[index].item()
            * model.loss_function(model.lm_head(model.model.norm(states)), batch.labels, model.config.vocab_size)
            for index, states in exits.items()
        ]
        return torch.stack(losses).sum() if losses else None

    def finish(self, model: PreTrainedModel) -> None:
        super().finish(model)
        make_whole(model)

    def _choose(self, index: int, hidden: Tensor) -> Tensor:
        kept = torch.rand(len(hidden), generator=self.coins) >= self.probabilities[index]
        self.count(kept)
        return kept.to(hidden.device, hidden.dtype)

    def _keep(self, block: nn.Module, index: int, states: Tensor) -> None:
        if not block.training or self.weights[index] == 0:
            return
        if index % self.params.rotation == self.step % self.params.rotation:
            self.exits[index] = states
