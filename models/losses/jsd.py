"""Generalised Jensen-Shannon divergence: β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q.

Forward KL as β goes to 0 and reverse KL as it goes to 1, both up to a factor, and bounded between: a token that one of
the two never says costs no more than the other's mass on it.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2306.13649, equation 1"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """What the two are held against."""

    name: Literal["jsd"] = "jsd"
    beta: float = Field(0.5, gt=0, lt=1, description="the target's share β of the mixture.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32; of a p that lies partly outside of the draft vocabulary, up to a constant of the row."""
    p, q = drafted.target_probs.float(), drafted.draft_logits.float().softmax(-1)
    mixture = params.beta * p + (1 - params.beta) * q
    return params.beta * _divergence(p, mixture) + (1 - params.beta) * _divergence(q, mixture)


def _divergence(left: Tensor, mixture: Tensor) -> Tensor:
    """Σ left · log(left / mixture), 0 · log 0 being 0; where left is above 0 so is the mixture."""
    tiny = torch.finfo(left.dtype).tiny
    return (left * (left.clamp(min=tiny).log() - mixture.clamp(min=tiny).log())).sum(-1)
