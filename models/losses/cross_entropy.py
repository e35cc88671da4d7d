"""Cross-entropy on the token that came: −log q(token), 0 where the draft can't propose it.

Hard labels. With answers that the target gave, it is sequence-level distillation; on text by anybody, training as of
any language model.
"""

from typing import Literal

from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1606.07947, section 3.2; of drafts: arXiv:2411.11055"
NEEDS = ("token",)
MINIMUM: tuple[Minimum, ...] = ("token",)


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["cross_entropy"] = "cross_entropy"


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    return -drafted.log_prob()
