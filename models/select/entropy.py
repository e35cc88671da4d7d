"""Entropy: −Σ p(y) log p(y), highest first, of a proxy trained on what was chosen so far.

As with `least_confidence` a document scores the mean over its tokens. Unlike that it sees the whole distribution: over
tens of thousands of tokens a long tail counts, which one likely token in front of it hides from the others.
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

    name: Literal["entropy"] = "entropy"


pick = by_score(lambda proxy: proxy.certainty.entropy)
