"""Total variation, 1 − Σ min(p(v), q(v)): the probability that the target rejects a token drawn from the draft.

It is what speculative decoding pays, but hard to learn from a cold start: where p and q hardly overlap, so does the
gradient.
"""

from typing import Literal

from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2310.08461, section 4; that it is the rejection rate: arXiv:2211.17192, theorem 3.5"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["total_variation"] = "total_variation"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32 in [0, 1]."""
    return 1 - drafted.acceptance()
