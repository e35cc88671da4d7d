"""What a draft proposes: a tree of tokens that go on from the last certain one. A chain is the tree without branches.

A proposal goes from the drafter to the target's pass, to the verification rule, and to the cache, which keeps the path
that was accepted.

Letters: B blocks, N drafted tokens (nodes) of a block, n nodes with k children each, V target vocabulary.
Row 0 of the target's pass is the last certain token, row i + 1 is node i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# How siblings are drawn: each by itself from q; each from what the ones before it left of q; the most likely tokens; or
# all but the last the most likely tokens, the last from what they leave of q.
Siblings = Literal["independent", "without replacement", "certain", "certain but one"]


class Choice(NamedTuple):
    """What a rule does with the siblings of a place."""

    chances: Tensor  # [n, k] that each is kept
    rest: Tensor  # [n, V] the law of the token that is emitted where none is


# p [n, V], token_ids [n, k], q [n, k, V] what each was drawn from → what is kept.
Choose = Callable[[Tensor, Tensor, Tensor], Choice]


@dataclass(frozen=True, eq=False)
class Proposal:
    """B blocks of N drafted tokens; all blocks are trees of one shape.

    Attributes:
        token_ids: [B, N] int64, target ids.
        parents: N node numbers, each below its own; -1 is the last certain token. Children of one node are tried in the
            order of their numbers.
        q: [B, N, V] the distribution that each token was drawn from, given all tokens before it in the block, at the
            sampling settings that are served; None where no chance was in it, as in greedy decoding and look-up.

    Raises:
        ValueError: the shapes don't fit each other, or a parent doesn't stand before its child.
    """

    token_ids: Tensor
    parents: tuple[int, ...]
    q: Tensor | None = None

    def __post_init__(self) -> None:
        """See `Raises`."""
        if self.token_ids.ndim != 2 or self.token_ids.dtype != torch.int64:
            raise ValueError(f"token_ids must be [B, N] int64, got {list(self.token_ids.shape)} {self.token_ids.dtype}")
        if len(self.parents) != self.token_ids.shape[1]:
            raise ValueError(f"{self.token_ids.shape[1]} tokens need a parent each, got {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"the parent of node {node} must be from -1 to {node - 1}, got {parent}")
        if self.q is not None and (self.q.ndim != 3 or self.q.shape[:2] != self.token_ids.shape):
            raise ValueError(f"q must be {[*self.token_ids.shape, 'V']}, got {list(self.q.shape)}")

    @classmethod
    def chain(
        cls, token_ids: Sequence[int], q: Sequence[Tensor | None] = (), device: torch.device | str = "cpu"
    ) -> "Proposal":
        """Return one block without branches: N target ids, and q [V] of each, None where no chance was in it."""
        drawn_from = [one for one in q if one is not None]
        tokens = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
        return cls(tokens, tuple(range(-1, len(token_ids) - 1)), torch.stack(drawn_from)[None] if drawn_from else None)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.parents)

    @cached_property
    def row_parents(self) -> tuple[int, ...]:
        """For each row of the target's pass the row that it follows; -1 for the first, which follows the cache."""
        return (-1, *(parent + 1 for parent in self.parents))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each row the nodes on the way to it, its own the last; none for row 0."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents):
            paths.append((*paths[parent + 1], node))
        return tuple(paths)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(map(len, self.paths))

    def distributions(self, vocab_size: int) -> Tensor:
        """Return q [B, N, V]; that of a token without chance has a single 1."""
        if self.q is not None:
            return self.q
        q = torch.zeros(*self.token_ids.shape, vocab_size, device=self.token_ids.device)
        return q.scatter_(-1, self.token_ids[..., None], 1.0)
