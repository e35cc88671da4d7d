"""Draft and target write each answer together: who writes a token is drawn for each.

x_t ~ share q(· | x_<t) + (1 − share) p(· | x_<t)

So the text leaves the target's ways again and again, and is brought back before it is lost.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from models.answers import RolloutParams
from models.core.learning.rollouts import Rollouts

PAPER = "arXiv:2306.08543, section 2.2 (teacher-mixed sampling); arXiv:2310.07177, mixed by token"
WRITES, LOGGED, ROUNDS = True, False, Rollouts


class Params(RolloutParams):
    """How they are mixed."""

    name: Literal["mixed_tokens"] = "mixed_tokens"
    share: float = Field(0.5, gt=0, lt=1, description="chance that the draft writes a token.")


def by_draft(lengths: Sequence[int], params: Params, rng: torch.Generator) -> list[list[bool] | None]:
    """Draw who writes each token; see `models.answers`."""
    return [(torch.rand(length, generator=rng) < params.share).tolist() for length in lengths]
