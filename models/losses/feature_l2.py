"""FitNets' hint: the draft's feature is to be the target's, by squared distance, beside the token that came.

(draft_hidden − target_hidden)², the mean over H,  −  w log q(token), 0 where the draft can't propose it

FitNets learns the hint first and labels after it, through a regressor, as its layers have other widths. A draft's
feature is as wide as the target's, and the two are learnt together, as Chimera does.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1412.6550, equation 3; of drafts: arXiv:2402.15758"
NEEDS = ("draft_hidden", "target_hidden", "token")
MINIMUM: tuple[Minimum, ...] = ("hidden", "token")


class Params(BaseParams):
    """How the two are weighed."""

    name: Literal["feature_l2"] = "feature_l2"
    classification: float = Field(1.0, ge=0, description="w.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    distance = (drafted.draft_hidden.float() - drafted.target_hidden.float()).square().mean(-1)
    return distance - params.classification * drafted.log_prob()
