"""Least confidence: 1 − max p(y), highest first, of a proxy trained on what was chosen so far.

The paper classifies, one prediction an example. A document is many: its score is the mean over its tokens, so that long
ones are not preferred. What no model can predict, such as noise, scores highest too.
"""

from typing import Literal

from models.params import BaseParams
from models.select import by_score

PAPER = "arXiv:1906.11829"
NEEDS_START = True
DRAFTS = False
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["least_confidence"] = "least_confidence"


pick = by_score(lambda proxy: -proxy.certainty.confidence)
