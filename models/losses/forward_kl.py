"""Forward KL over the draft vocabulary: Σ p(v) · (log p(v) − log q(v)), up to the target's entropy.

p is not normalised over the draft vocabulary, so a position whose mass lies outside of it, where any draft is rejected,
weighs less.
"""

from typing import Literal

from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1503.02531, section 2, at temperature 1"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["forward_kl"] = "forward_kl"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32, without the entropy term, which no draft can change."""
    return drafted.cross_entropy()
