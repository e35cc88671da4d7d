"""The draft's own answers: it learns what the target would have said where the draft itself would have led.

x_t ~ q(· | x_<t), and the loss compares q with p there

A draft that only ever read the target's text meets in serving, after its own tokens, what it was never taught.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from models.answers import RolloutParams
from models.core.learning.rollouts import Rollouts

PAPER = "arXiv:2310.08461; arXiv:2306.13649"
WRITES, LOGGED, ROUNDS = True, False, Rollouts


class Params(RolloutParams):
    """Nothing to set beyond that."""

    name: Literal["on_policy"] = "on_policy"


def by_draft(lengths: Sequence[int], params: Params, rng: torch.Generator) -> list[list[bool] | None]:
    """Let the draft write everything; see `models.answers`."""
    return [[True] * length for length in lengths]
