"""Activation checkpointing: a block keeps its input alone, and is computed again when the backward pass reaches it.

The gradients are the same; a third more FLOPs buy back all but one block's activations. The reentrant form is taken,
because what it computes again is seen by hooks on saved tensors, so that `models.core.learning.counting` counts all of
the peak. It needs an input with a gradient, which a frozen embedding doesn't give: a hook of transformers makes it.
"""

from typing import Literal

from pydantic import Field
from transformers import PreTrainedModel

from models.params import BaseParams
from models.regimes import Regime

PAPER = "arXiv:1604.06174"
CHANGES = ("activations",)


class Params(BaseParams):
    """Which blocks are computed again."""

    name: Literal["checkpointing"] = "checkpointing"
    every: int = Field(1, ge=1, description="each so-many-th block, 1 is all of them.")


CORNERS = (Params(every=2),)


class Hooks(Regime):
    """Refuses a model that can't be checkpointed or is already."""

    params: Params

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        if model.is_gradient_checkpointing:
            raise ValueError("the model is checkpointed already; give it without")
        model.gradient_checkpointing_enable({"use_reentrant": True}, every_n_layers=self.params.every)

    def finish(self, model: PreTrainedModel) -> None:
        model.disable_input_require_grads()  # transformers sets this hook when it is enabled, and leaves it
        model.gradient_checkpointing_disable()
