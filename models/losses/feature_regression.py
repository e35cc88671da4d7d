"""EAGLE's loss: the draft's feature is to be the target's, and what the output matrix makes of it too.

smooth L1(draft_hidden − target_hidden), the mean over H,  −  w Σ p(v) log q(v)
"""

from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2401.15077, section 4.2"
NEEDS = ("draft_hidden", "target_hidden", "target_probs")
MINIMUM: tuple[Minimum, ...] = ("hidden", "distribution")


class Params(BaseParams):
    """How the two are weighed."""

    name: Literal["feature_regression"] = "feature_regression"
    classification: float = Field(0.1, ge=0, description="w.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    distance = functional.smooth_l1_loss(
        drafted.draft_hidden.float(), drafted.target_hidden.float(), reduction="none"
    ).mean(-1)
    return distance + params.classification * drafted.cross_entropy()
