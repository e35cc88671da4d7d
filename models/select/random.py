"""Random documents: the baseline of the others, and their first round."""

from collections.abc import Sequence
from typing import Literal

import torch

from models.params import BaseParams
from models.select import Proxy, draw

PAPER = "none"
NEEDS_START = False
DRAFTS = False
TRAINS = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["random"] = "random"


def pick(proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: Params, rng: torch.Generator) -> list[int]:
    """Draw `num_wanted` documents that were not chosen yet; see `models.select`."""
    return draw(len(proxy.pool), chosen, num_wanted, rng)
