"""Hydra: Medusa's heads, but each one reads what the heads before it have drafted.

    q_k(·) = softmax(W₂ᵏ (R x + SiLU(W₁ᵏ x + b))),   x = [h; E(x₁); …; E(x_k)]

h is the state of the token before the last certain one, x₁ that one, x₂ … x_k what was drafted, E the target's input
embedding. So a draft hangs together: what head k says follows the token that head k − 1 has drafted, and in a tree
differs from branch to branch. R narrows what the first layer's residual carries; it starts as [1 0 … 0], so that a new
head is a new Medusa head. The paper's plain heads: multi-layer perceptrons, cross-entropy on the tokens that came, all
heads alike. Hydra++ distils (`loss = { name = "forward_kl" }`) with four layers; its attention over the prefix is not
here.
"""

from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from models.core.checkpoints.loading import read_tensor
from models.core.drafting.heads import SIZES, Format, Heads, HeadsParams
from models.drafts import Procedure
from models.losses import cross_entropy

PAPER = "arXiv:2402.05109, section 3"
ARCHITECTURES = ("HydraModel",)
SERVED = False


class Params(HeadsParams):
    """Shape of new heads."""

    name: Literal["hydra"] = "hydra"


class Hydra(Heads):
    """See `models.core.drafting.heads.Heads`. The target's embedding is borrowed too."""

    procedure = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=1.0)
    embedding: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.register_buffer("embedding", torch.empty(0), persistent=False)

    def borrow(self, target_dir: Path) -> Self:
        self.embedding = read_tensor(target_dir, "model.embed_tokens.weight").float()
        return super().borrow(target_dir)

    def num_inputs(self, head: int) -> int:
        return head + 2

    def inputs(self, head: int, state: Tensor, token_ids: Tensor) -> Tensor:
        return torch.cat([state, functional.embedding(token_ids, self.embedding).flatten(1)], dim=-1)


_format = Format("hydra", ARCHITECTURES, Hydra, SIZES)
create, renew, save, load, check = _format.create, _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights
