"""Trees: which tokens are proposed side by side, so that one pass of the target tries several continuations.

Letters: N nodes, V target vocabulary. Nodes are numbered in level order, parents before children, as in a `Proposal`;
−1 is the root, the last certain token. The rank of a node is its place among its siblings, 0 for the likeliest token.

A tree's module has

- `BRANCHES`: whether it proposes more than one token after another; without it a drafter proposes in its own way;
- `grow(expand, num_tokens, params) -> Proposal`: ask a draft level by level and propose at most `num_tokens` tokens;
- `shape(num_tokens, params) -> Shape`, only in trees that are the same in each step: what `grow` fills.

Tokens of a tree are a draft's likeliest ones and not drawn, so their q is certain: which of them are proposed follows
from the text alone, and a rule that keeps the target's distribution for any certain draft keeps it here.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.core.drafting.proposal import Proposal

# (token ids of the tree so far, parent of each, nodes to go on from) → [n, V] log-probabilities of what follows each,
# −∞ of what the draft can't say there.
Expand = Callable[[Sequence[int], Sequence[int], Sequence[int]], Tensor]


class Shape(NamedTuple):
    """A tree without its tokens: N parents and ranks."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def levels(self) -> list[list[int]]:
        depths: list[int] = []
        levels: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            if depths[node] == len(levels):
                levels.append([])
            levels[depths[node]].append(node)
        return levels


def fill(shape: Shape, expand: Expand) -> Proposal:
    """Give each node of a shape its token: the one of its rank in the draft's distribution after its parent. A node for
    which there is no token that can be drafted is left out, and so is what follows it."""
    tokens: list[int] = []
    parents: list[int] = []
    numbers = {-1: -1}  # nodes of the shape that are filled
    device = torch.device("cpu")
    for level in shape.levels:
        nodes = [node for node in level if shape.parents[node] in numbers]
        if not nodes:
            break
        above = sorted({numbers[shape.parents[node]] for node in nodes})
        log_probs = expand(tokens, parents, above)
        device = log_probs.device
        widest = 1 + max(shape.ranks[node] for node in nodes)
        best = log_probs.topk(min(widest, log_probs.shape[-1]))
        values, token_ids = best.values.tolist(), best.indices.tolist()
        for node in nodes:
            parent, rank = numbers[shape.parents[node]], shape.ranks[node]
            place = above.index(parent)
            if rank < len(values[place]) and values[place][rank] > -math.inf:
                numbers[node] = len(tokens)
                tokens.append(token_ids[place][rank])
                parents.append(parent)
    return Proposal(torch.tensor([tokens], dtype=torch.int64, device=device), tuple(parents))


def proposed(nodes: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], device: torch.device) -> Proposal:
    """Propose some nodes of a tree, with each its parent, in the order of their numbers."""
    kept = sorted(nodes)
    numbers = {-1: -1} | {node: number for number, node in enumerate(kept)}
    tokens = torch.tensor([[token_ids[node] for node in kept]], dtype=torch.int64, device=device)
    return Proposal(tokens, tuple(numbers[parents[node]] for node in kept))


def path_to(node: int, token_ids: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens from the root to a node, its own the last; of -1 none."""
    path: list[int] = []
    while node >= 0:
        path.append(token_ids[node])
        node = parents[node]
    return tuple(path[::-1])


def merge(continuations: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[int], tuple[int, ...]]:
    """Return tokens and parents of the tree of the commonest beginnings of some continuations, likeliest first.

    A beginning is as common as all that go on from it together, so what is kept is a tree whatever the budget. Of
    equally common ones the shorter is kept, then the one that came first.
    """
    counts = Counter(tuple(one[:size]) for one in continuations for size in range(1, len(one) + 1))
    kept = sorted(counts, key=lambda start: (-counts[start], len(start)))[:num_tokens]
    numbers = {start: node for node, start in enumerate(kept)}
    return [start[-1] for start in kept], tuple(numbers.get(start[:-1], -1) for start in kept)


class Layout(NamedTuple):
    """How a model reads nodes of a tree with their paths, after tokens that are certain."""

    token_ids: list[int]  # of each row
    parents: list[int]  # the row that each follows, −1 for what was read before
    rows: list[int]  # of each node that was asked for


def lay_out(certain: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Layout:
    """Return the rows of a pass over some nodes, also −1, after tokens that are certain, the last being the root."""
    needed: set[int] = set()
    for node in nodes:
        while node >= 0 and node not in needed:
            needed.add(node)
            node = parents[node]
    rows = {-1: len(certain) - 1} | {node: len(certain) + place for place, node in enumerate(sorted(needed))}
    read = [node for node in rows if node >= 0]
    return Layout(
        [*certain, *(token_ids[node] for node in read)],
        [*range(-1, len(certain) - 1), *(rows[parents[node]] for node in read)],
        [rows[node] for node in nodes],
    )
