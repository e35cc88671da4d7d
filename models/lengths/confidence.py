"""Draft on while the draft is sure: stop at the first token of which its highest probability is below a threshold.

The token that the draft was unsure of is proposed all the same: it is there already, and a row of the target is cheap.
Kangaroo exits its draft early in this way. A draft that looks up does not ask, and drafts K tokens; a recipe with it is
refused, and so is a tree, which ends by its own rule.
"""

from typing import Literal

from pydantic import Field

from models.lengths import View, all_tokens
from models.params import BaseParams

PAPER = "arXiv:2404.18911, section 3"


class Params(BaseParams):
    """When to stop.

    Attributes:
        threshold: the draft's highest probability, at temperature 1, below which it stops; 0 never stops.
    """

    name: Literal["confidence"] = "confidence"
    threshold: float = Field(0.6, ge=0, le=1)


num_draft_tokens = all_tokens  # `go_on` ends a step


def go_on(view: View, params: Params) -> bool:
    """Return whether the draft was sure of its last token."""
    return view.confidences[-1] >= params.threshold
