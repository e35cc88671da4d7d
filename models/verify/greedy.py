"""Greedy verification: keep drafted tokens while each is the target's most likely one, then emit the target's.

A tie goes to the lower token id, as in argmax. q and rng are not read: whatever the draft is, the output is the
target's greedy output. In a tree that child is kept which is the target's token, of equal ones the first.
"""

from typing import Literal

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal, Siblings
from models.params import BaseParams
from models.verify import Verified, check_block, common_prefix, expected_of_greedy, follow

PAPER = "arXiv:1811.03115, section 3"
LOSSLESS = True
SAMPLES = False
SIBLINGS: tuple[Siblings, ...] = ("certain", "certain but one", "independent", "without replacement")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["greedy"] = "greedy"


def verify(proposal: Proposal, p: Tensor, rng: torch.Generator, params: Params) -> Verified:
    """Verify one drafted tree a block; see `models.verify`."""
    check_block(proposal, p)
    return follow(proposal, p.argmax(dim=-1))


expected_accepted = expected_of_greedy
count_accepted = common_prefix  # a rejected token is not the target's, so it is never emitted in its place
