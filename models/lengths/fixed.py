"""Always K tokens."""

from collections.abc import Sequence
from typing import Literal

from models.params import BaseParams

PAPER = "arXiv:2211.17192, section 3"


class Params(BaseParams):
    """Nothing to set; K is the engine's."""

    name: Literal["fixed"] = "fixed"


def num_draft_tokens(steps: Sequence[tuple[int, int]], limit: int, params: Params) -> int:
    """Return how many tokens to draft.

    Args:
        steps: (drafted, accepted) of each step so far.
        limit: K.
        params: nothing to set.
    """
    return limit
