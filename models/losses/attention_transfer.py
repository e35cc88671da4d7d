"""Attention transfer: where the target's features are strong, the draft's are to be strong.

−Σ p(v) log q(v)  +  β/2 (s/‖s‖ − t/‖t‖)²,   s, t [N]: the sum of squares of a row's feature, the draft's and target's

The paper's attention map is over the positions of an image, here over the rows of a batch; its label is the target's
distribution, and the norm of the difference is squared, as in its code. β there is a thousand. Its gradient transfer
is not here: it compares gradients by the input, and of the target a pass is kept, not how it came about.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:1612.03928, equation 2; github.com/szagoruyko/attention-transfer"
NEEDS = ("draft_hidden", "target_hidden", "target_probs")
MINIMUM: tuple[Minimum, ...] = ("hidden neurons", "distribution")


class Params(BaseParams):
    """How the two are weighed."""

    name: Literal["attention_transfer"] = "attention_transfer"
    weight: float = Field(1000.0, ge=0, description="β.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    draft, target = (
        functional.normalize(hidden.float().square().sum(-1), dim=0)
        for hidden in (drafted.draft_hidden, drafted.target_hidden)
    )
    return drafted.cross_entropy() + params.weight / 2 * (draft - target).square()
