"""Some answers are the draft's own, the others the target's as they are; which ones is drawn anew in each round."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from models.answers import RolloutParams
from models.core.learning.rollouts import Rollouts

PAPER = "arXiv:2310.08461; arXiv:2310.07177, mixed by request"
WRITES, LOGGED, ROUNDS = True, False, Rollouts


class Params(RolloutParams):
    """How they are mixed."""

    name: Literal["mixed_requests"] = "mixed_requests"
    share: float = Field(0.5, gt=0, lt=1, description="of the answers that the draft writes, rounded to whole ones.")


def by_draft(lengths: Sequence[int], params: Params, rng: torch.Generator) -> list[list[bool] | None]:
    """Draw the answers that the draft writes, at least one; see `models.answers`."""
    num_written = max(1, round(params.share * len(lengths)))
    written = set(torch.randperm(len(lengths), generator=rng)[:num_written].tolist())
    return [[True] * length if place in written else None for place, length in enumerate(lengths)]
