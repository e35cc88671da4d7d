"""Margin: the likeliest token's probability less the second one's, smallest first, of a proxy.

As with `least_confidence` a document scores the mean over its tokens. What it looks for is two rivals, so a token that
could be anything and one that is one of two both score high.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from models.params import BaseParams
from models.select import Proxy, highest

PAPER = (
    "Scheffer et al., Active Hidden Markov Models for Information Extraction, 2001, in the rounds of arXiv:1906.11829"
)
NEEDS_START = True
DRAFTS = False
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["margin"] = "margin"


def pick(proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: Params, rng: torch.Generator) -> list[int]:
    """Pick the documents where the proxy hesitates most between two tokens; see `models.select`."""
    return highest(-proxy.certainty.margin, chosen, num_wanted)
