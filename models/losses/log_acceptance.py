"""−log Σ min(p(v), q(v)): total variation's aim with its gradient divided by the acceptance.

Where p and q hardly overlap, total variation teaches next to nothing; divided by the overlap, its gradient is as long
there as anywhere.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from models.losses import Drafted, Minimum
from models.params import BaseParams

PAPER = "arXiv:2602.23881, section 4.3 (LK-α)"
NEEDS = ("target_probs",)
MINIMUM: tuple[Minimum, ...] = ("distribution",)


class Params(BaseParams):
    """Where the logarithm ends."""

    name: Literal["log_acceptance"] = "log_acceptance"
    floor: float = Field(1e-6, gt=0, lt=1, description="what is added to the acceptance, so that 0 has one.")


def loss(drafted: Drafted, params: Params) -> Tensor:
    """Return [N] float32."""
    return -(drafted.acceptance() + params.floor).log()
