"""Sequoia's optimal tree: of all trees of N nodes the one that is expected to have most tokens accepted.

The rank-r child of an accepted node is accepted with probability aᵣ, whatever the tokens are. A node then counts with
the product of a along its path, and the best tree follows from a dynamic programme over its size: with F(n, d) of the
best n nodes and d levels below an accepted node, and G(n, r, d) of those in its children from rank r on,

    F(n, d) = G(n, 0, d),   G(n, r, d) = max over m of  aᵣ · (1 + F(m − 1, d − 1)) + G(n − m, r + 1, d).
"""

from functools import cache, lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from models.core.drafting.proposal import Proposal
from models.params import BaseParams
from models.trees import Expand, Shape, fill

PAPER = "arXiv:2402.12374, section 3.1"
BRANCHES = True


class Params(BaseParams):
    """What the tree is optimal for.

    Attributes:
        acceptance: chance that the target's token is a draft's likeliest, second, … one; more children there are not.
        max_depth: the longest path.
    """

    name: Literal["sequoia"] = "sequoia"
    acceptance: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field((0.5, 0.15, 0.08, 0.05), min_length=1)
    max_depth: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _is_a_distribution(self) -> Self:
        if sum(self.acceptance) > 1 + 1e-9:
            raise ValueError(f"the chances of acceptance must sum to at most 1; they sum to {sum(self.acceptance):g}")
        return self


def shape(num_tokens: int, params: Params) -> Shape:
    """Return the tree of at most N nodes; fewer where no place is left; see `models.trees`."""
    return _shape(num_tokens, params.acceptance, params.max_depth)


def grow(expand: Expand, num_tokens: int, params: Params) -> Proposal:
    """Propose the tree's tokens; see `models.trees`."""
    return fill(shape(num_tokens, params), expand)


def expected_accepted(shape: Shape, acceptance: tuple[float, ...]) -> float:
    """Return the mean number of accepted tokens of a tree whose rank-r children are accepted with chance aᵣ."""
    chances: list[float] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        chances.append((chances[parent] if parent >= 0 else 1.0) * acceptance[rank])
    return sum(chances)


@lru_cache(maxsize=64)
def _shape(num_tokens: int, acceptance: tuple[float, ...], max_depth: int) -> Shape:
    @cache
    def best(size: int, rank: int, depth: int) -> tuple[float, int]:
        """Return G and the size of the subtree in the child of that rank."""
        if not size or not depth or rank == len(acceptance):
            return 0.0, 0
        choices = [(best(size, rank + 1, depth)[0], 0)]
        for inside in range(1, size + 1):
            below = best(inside - 1, 0, depth - 1)[0]
            rest = best(size - inside, rank + 1, depth)[0]
            choices.append((acceptance[rank] * (1 + below) + rest, inside))
        return max(choices)

    level = [(-1, num_tokens, max_depth)]  # a node, and how many nodes how deep are below it
    parents: list[int] = []
    ranks: list[int] = []
    while level:
        below = []
        for node, size, depth in level:
            left = size
            for rank in range(len(acceptance)):
                inside = best(left, rank, depth)[1]
                left -= inside
                if inside:
                    below.append((len(parents), inside - 1, depth - 1))
                    parents.append(node)
                    ranks.append(rank)
        level = below
    return Shape(tuple(parents), tuple(ranks))
