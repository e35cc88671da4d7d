"""Cross-entropy on the token that came, where the draft can propose it; led astray, a row counts half."""

from typing import Literal

import torch
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "made up"
NEEDS = ("token", "on_policy")
MINIMUM: tuple[Minimum, ...] = ("token",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["hard_label"] = "hard_label"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N]."""
    known = drafted.token >= 0
    log_q = drafted.draft_logits.float().log_softmax(-1)
    said = log_q.gather(-1, drafted.token.clamp(min=0)[:, None])[:, 0]
    return torch.where(known, -said, 0.0) * torch.where(drafted.on_policy, 1.0, 0.5)
