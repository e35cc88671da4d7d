"""Least confidence: 1 − max p(y), highest first, of a proxy trained on what was chosen so far.

The paper classifies, one prediction an example. A document is many: its score is the mean over its tokens, so that long
ones are not preferred. What no model can predict, such as noise, scores highest too.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from models.params import BaseParams
from models.select import Proxy, highest

PAPER = "arXiv:1906.11829"
NEEDS_START = True
DRAFTS = False
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["least_confidence"] = "least_confidence"


def pick(proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: Params, rng: torch.Generator) -> list[int]:
    """Pick the documents that the proxy is least sure of; see `models.select`."""
    return highest(-proxy.certainty.confidence, chosen, num_wanted)
