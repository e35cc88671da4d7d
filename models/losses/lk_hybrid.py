"""λ · KL + (1 − λ) · total variation, with λ = exp(−η α): KL until tokens are accepted, then what acceptance asks for.

α is the row's own acceptance Σ min(p, q), through which nothing is learnt; the paper takes the mean of a draft's place.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2602.23881, sections 4.2 and 4.4 (LK-λ)"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """How the two are weighed."""

    name: Literal["lk_hybrid"] = "lk_hybrid"
    eta: float = Field(3.0, ge=0, description="how soon acceptance takes over; 0 is KL alone.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32; of a p that lies partly outside of the draft vocabulary, up to a constant of the row."""
    p = drafted.target_probs.float()
    log_q = drafted.draft_logits.float().log_softmax(-1)
    divergence = (p * (p.clamp(min=torch.finfo(p.dtype).tiny).log() - log_q)).sum(-1)
    accepted = drafted.acceptance()
    weight = (-params.eta * accepted.detach()).exp()
    return weight * divergence + (1 - weight) * (1 - accepted)
