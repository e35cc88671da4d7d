"""A chain: one token after another, as a drafter proposes by itself; at temperature > 0 they are drawn from q."""

from typing import Literal

from models.core.drafting.proposal import Proposal
from models.params import BaseParams
from models.trees import Expand, Shape, fill

PAPER = "arXiv:2211.17192, algorithm 1"
BRANCHES = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["chain"] = "chain"


def shape(num_tokens: int, params: Params) -> Shape:
    """Return N nodes in a row."""
    return Shape(tuple(range(-1, num_tokens - 1)), (0,) * num_tokens)


def grow(expand: Expand, num_tokens: int, params: Params) -> Proposal:
    """Propose the likeliest token, then the likeliest after it, and so on."""
    return fill(shape(num_tokens, params), expand)
