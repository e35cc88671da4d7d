"""Cross-entropy on the token that came: −log q(x), and 0 where the draft can't propose it."""

from typing import Literal

import torch
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2401.10774, equation 1; arXiv:1503.02531, section 2 (the correct labels)"
NEEDS = ("token",)
MINIMUM: tuple[Minimum, ...] = ("token",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["cross_entropy"] = "cross_entropy"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    known = drafted.token >= 0
    log_q = drafted.draft_logits.float().log_softmax(-1)
    said = log_q.gather(-1, drafted.token.clamp(min=0)[:, None])[:, 0]
    return torch.where(known, -said, 0.0)
