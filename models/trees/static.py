"""Static expansion ⟨k₁, k₂, …⟩: every node of depth i − 1 has the kᵢ likeliest tokens as children (SpecInfer, Medusa).

A tree of more nodes than may be drafted is cut in level order, so that it loses its deepest nodes of the last ranks.
"""

from typing import Annotated, Literal

from pydantic import Field

from models.core.drafting.proposal import Proposal
from models.params import BaseParams
from models.trees import Expand, Shape, fill

PAPER = "arXiv:2305.09781, section 3.1; arXiv:2401.10774"
BRANCHES = True


class Params(BaseParams):
    """How it expands."""

    name: Literal["static"] = "static"
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (3, 2, 1, 1), min_length=1, description="children of each node, by depth."
    )


def shape(num_tokens: int, params: Params) -> Shape:
    """Return the tree, cut to N nodes; see `models.trees`."""
    parents: list[int] = []
    ranks: list[int] = []
    level = [-1]
    for width in params.widths:
        children = [(parent, rank) for parent in level for rank in range(width)]
        # Of a level that is cut, every node has its likeliest child first.
        children = sorted(sorted(children, key=lambda child: child[1])[: num_tokens - len(parents)])
        level = [len(parents) + number for number in range(len(children))]
        parents += [parent for parent, _ in children]
        ranks += [rank for _, rank in children]
    return Shape(tuple(parents), tuple(ranks))


def grow(expand: Expand, num_tokens: int, params: Params) -> Proposal:
    """Propose the tree's tokens; see `models.trees`."""
    return fill(shape(num_tokens, params), expand)
