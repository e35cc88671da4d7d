"""Stochastic mini-batch dropping: each step is left out with probability p, by a coin of its own.

A dropped batch is not read, but its place in the learning-rate schedule passes; so p = 0.5 costs half of the steps and
is to be compared with training of half as many epochs, as the paper does.
"""

from typing import Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from models.params import BaseParams
from models.regimes import Regime

PAPER = "arXiv:1910.13349, section 3.1"
CHANGES = ("steps",)


class Params(BaseParams):
    """How much is left out."""

    name: Literal["minibatch_drop"] = "minibatch_drop"
    probability: float = Field(0.5, gt=0, lt=1, description="that a step is left out.")


class Hooks(Regime):
    """Refuses a training of which every single step happens to be left out."""

    params: Params

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        # All coins at once: a resumed run sees the same ones without keeping a state.
        self.kept = torch.rand(num_steps, generator=self.rng) >= self.params.probability
        if not self.kept.any():
            raise ValueError(
                f"probability {self.params.probability} leaves out all {num_steps} steps; train more steps"
            )

    def runs(self, step: int) -> bool:
        return bool(self.kept[step])
