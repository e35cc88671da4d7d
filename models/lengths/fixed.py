"""Always K tokens."""

from typing import Literal

from models.lengths import View
from models.params import BaseParams

PAPER = "arXiv:2211.17192, section 3"


class Params(BaseParams):
    """Nothing to set; K is the engine's."""

    name: Literal["fixed"] = "fixed"


def num_draft_tokens(view: View, params: Params) -> int:
    """Return how many tokens to draft.

    Args:
        view: only its `limit` counts.
        params: nothing to set.
    """
    return view.limit
