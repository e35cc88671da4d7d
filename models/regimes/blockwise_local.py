"""Block-wise local learning: each group of blocks is trained by a loss of its own, and no gradient leaves it.

After each group but the last the states go through an auxiliary norm of the group's own and the model's output matrix
to a next-token loss, whose backward pass is run at once, so that the group's activations are freed before the next
group runs. The last group is trained by the model's own loss.

What readers of the paper would not expect: BIM trains vision encoders by masked images, with a decoder for each block;
here the loss is the language model's and the decoders share the output matrix, which every group trains. The auxiliary
norms are thrown away in the end. It needs no loop of its own: the local passes run inside of the loop's forward pass
and leave their gradients for its step.
"""

import copy
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.params import BaseParams
from models.regimes import Regime

PAPER = "arXiv:2311.17218, section 3"
CHANGES = ("depth", "activations")


class Params(BaseParams):
    """How the blocks are grouped."""

    name: Literal["blockwise_local"] = "blockwise_local"
    num_groups: int = Field(
        4, ge=2, description="groups that the blocks fall into, at most one for each block; the paper has 4."
    )


class Hooks(Regime):
    """Refuses a model of one block or not of Llama's layout."""

    params: Params

    def start(self, model: PreTrainedModel, num_steps: int) -> list[nn.Parameter]:
        layers = blocks(model)
        if len(layers) < 2:
            raise ValueError("blockwise_local takes a model of at least 2 blocks; got 1")
        num_groups = min(self.params.num_groups, len(layers))
        ends = [len(layers) * (number + 1) // num_groups - 1 for number in range(num_groups - 1)]
        norms = [copy.deepcopy(model.model.norm).requires_grad_(True) for _ in ends]
        learning = [
            layers[end].register_forward_hook(lambda module, args, states, norm=norm: self._learn(model, norm, states))
            for end, norm in zip(ends, norms, strict=True)
        ]
        self.handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True), *learning]
        return [parameter for norm in norms for parameter in norm.parameters()]

    def _begin(self, model: nn.Module, args: tuple[Tensor, ...], settings: dict[str, Any]) -> None:
        self.labels = settings.get("labels")

    def _learn(self, model: PreTrainedModel, norm: nn.Module, states: Tensor) -> Tensor:
        """Train the group that has just run; return its output, cut off from it."""
        if not model.training:
            return states
        loss = model.loss_function(model.lm_head(norm(states)), self.labels, model.config.vocab_size)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"a group's loss is {float(loss.detach())}; the model is discarded")
        loss.backward()
        return states.detach()
