"""Total variation, which weighs more the further a step is from what is certain."""

from typing import Literal

from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "made up"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """What each step adds to the weight."""

    name: Literal["late_steps"] = "late_steps"
    slope: float = 0.5


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N]."""
    q = drafted.draft_logits.float().softmax(-1)
    return (1 + params.slope * drafted.step) * 0.5 * (q - drafted.target_probs).abs().sum(-1)
