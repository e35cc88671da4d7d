"""Greedy k-center: next is always the document that is farthest from all chosen ones.

Distances are Euclidean between mean last hidden states of the target, which are computed once: nothing is trained
between rounds. Greedy covering is within twice the best radius. The paper refines it with a mixed-integer program that
leaves some outliers uncovered; that step is left out, so outliers are taken first. Of an empty choice the first
document is drawn at random.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from models.params import BaseParams
from models.select import Proxy, draw

PAPER = "arXiv:1708.00489 (Sener and Savarese 2018), algorithm 1"
NEEDS_START = False
DRAFTS = False
TRAINS = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["kcenter"] = "kcenter"


def pick(proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: Params, rng: torch.Generator) -> list[int]:
    """Pick the documents that cover the pool; see `models.select`."""
    states = proxy.features
    picked = [] if chosen else draw(len(states), (), 1, rng)
    nearest = torch.full((len(states),), torch.inf)
    for place in [*chosen, *picked]:
        nearest = torch.minimum(nearest, (states - states[place]).norm(dim=1))
    taken = [*chosen, *picked]
    while len(picked) < num_wanted:
        nearest[taken] = -1.0  # a copy of a chosen document is at 0, and still better than the document itself
        farthest = int(nearest.argmax())
        picked.append(farthest)
        taken.append(farthest)
        nearest = torch.minimum(nearest, (states - states[farthest]).norm(dim=1))
    return picked
