"""Reverse KL over the draft vocabulary: Σ q(v) · (log q(v) − log p(v)), weighed by the mass that can be drafted.

It asks the draft for less than everything: mass on what the target never says costs most, mass that is missing costs
little. Of a position whose target lies outside of the draft vocabulary there is nothing to learn, so it weighs nothing.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2306.08543, section 2.1; summed over the vocabulary instead of sampled, as in arXiv:2310.08461"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """Where the logarithm ends."""

    name: Literal["reverse_kl"] = "reverse_kl"
    least_prob: float = Field(
        1e-6, gt=0, lt=1, description="the least that p counts as: log p has no bound of its own."
    )


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    p = drafted.target_probs.float()
    log_q = drafted.draft_logits.float().log_softmax(-1)
    return p.sum(-1) * (log_q.exp() * (log_q - p.clamp(min=params.least_prob).log())).sum(-1)
