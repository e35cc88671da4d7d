"""TVD++: the gradient of total variation as of a policy, with the reward standardised.

A token is rewarded with 1 where the target finds it likelier than the draft does. Total variation's gradient is that of
−Σ q(v) r(v) with r held; here r is replaced by (r − mean) / deviation, both under q, so that rows in which nearly every
token is rewarded, or nearly none, teach as much as others. The paper takes mean and deviation over the tokens that it
sampled; here they are exact in each row.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2403.00858, section 2.2"
NEEDS = ("target_probs",)
# Its value says nothing: only its gradient is meant.
MINIMUM: tuple[Minimum, ...] = ()
AGREED = 1e-6  # probabilities that differ by less do so for rounding


class Params(BaseParams):
    """How far standardising goes.

    Attributes:
        least_deviation: what a row is divided by at the least: where draft and target agree there is next to none.
    """

    name: Literal["tvd_plus_plus"] = "tvd_plus_plus"
    least_deviation: float = Field(1e-2, gt=0)


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    p, q = drafted.target_probs.float(), drafted.draft_logits.float().softmax(-1)
    policy = q.detach()
    reward = (p - policy > AGREED).float()
    mean = (policy * reward).sum(-1, keepdim=True)
    deviation = (policy * (reward - mean).square()).sum(-1, keepdim=True).sqrt()
    advantage = (reward - mean) / deviation.clamp(min=params.least_deviation)
    return -(q * advantage).sum(-1)
