"""Squared distance of the hidden states, and forward KL."""

from typing import Literal

from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "made up"
NEEDS = ("draft_hidden", "target_hidden", "target_probs")
MINIMUM: tuple[Minimum, ...] = ("hidden", "distribution")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["hidden_l2"] = "hidden_l2"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N]."""
    distance = (drafted.draft_hidden.float() - drafted.target_hidden).square().mean(-1)
    return distance - (drafted.target_probs * drafted.draft_logits.float().log_softmax(-1)).sum(-1)
