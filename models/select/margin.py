"""Margin: the likeliest token's probability less the second one's, smallest first, of a proxy.

As with `least_confidence` a document scores the mean over its tokens. What it looks for is two rivals, so a token that
could be anything and one that is one of two both score high.
"""

from typing import Literal

from models.params import BaseParams
from models.select import by_score

PAPER = (
    "Scheffer et al., Active Hidden Markov Models for Information Extraction, 2001, in the rounds of arXiv:1906.11829"
)
NEEDS_START = True
DRAFTS = False
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["margin"] = "margin"


pick = by_score(lambda proxy: -proxy.certainty.margin)
