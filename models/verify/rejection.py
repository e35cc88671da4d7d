"""Speculative sampling: keep a drafted x with probability min(1, p(x) / q(x)), else draw from max(p − q, 0) / its sum.

Where a node has several children they are tried in turn, each against what the one before it left: p becomes the
residual after a rejection (SpecInfer's multi-round sampling). Each child must have been drawn from its own q given the
children before it: independently from one q, without replacement from what is left of it, or with certainty.
Where the path ends, one more token is drawn from what is left of p, which after the last node is all of it.
"""

from typing import Literal

from torch import Tensor

from models.core.drafting.proposal import Choice, Siblings
from models.params import BaseParams
from models.verify import by_choice, common_prefix, expected_of_rejection, reject_in_turn

PAPER = "arXiv:2211.17192, algorithm 1; trees: arXiv:2305.09781, algorithm 2"
LOSSLESS = True
SAMPLES = True
SIBLINGS: tuple[Siblings, ...] = ("independent", "without replacement", "certain", "certain but one")


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["rejection"] = "rejection"


def choose(p: Tensor, token_ids: Tensor, q: Tensor, params: Params) -> Choice:
    """Try the children of a node in turn; see `models.verify.reject_in_turn`."""
    return reject_in_turn(p, token_ids, q)


verify = by_choice(choose)
expected_accepted = expected_of_rejection
count_accepted = common_prefix  # a rejected token is never emitted in its place, max(p − q, 0) being 0 there
