"""DySpec's tree: of all trees of N nodes the one that its draft expects most accepted tokens of, grown node by node.

Taken for the chance that a token is accepted, the draft's probabilities make a node worth v, their product on its path,
and a tree Σ v accepted tokens. A heap holds the likeliest child of the root, and of each chosen node, that is yet to be
chosen; N times the most valuable is. No node is worth more than its parent, so nothing better can turn up later, and
the greedy choice is the best tree of its size, however deep or wide.

The draft is asked as late as can be. What follows a node is worth at most the node, so a known token that is worth as
much is chosen before; then the draft says what follows all chosen nodes that it was not asked about, in one pass.

The paper draws the children of a node without replacement; they are the likeliest here, as in all trees. Unlike
`dynamic` it has no bound of depth and width, at the price of more passes of a draft that is sure.
"""

import heapq
import math
from typing import Literal

import torch
from pydantic import Field

from models.params import BaseParams
from models.proposal import Proposal
from models.trees import Expand

PAPER = "arXiv:2410.11744"
BRANCHES = True


class Params(BaseParams):
    """When it ends early.

    Attributes:
        threshold: nodes of less value than this are not proposed, and the draft is not asked what follows them.
    """

    name: Literal["dyspec"] = "dyspec"
    threshold: float = Field(0.0, ge=0, lt=1)


def grow(expand: Expand, num_tokens: int, params: Params) -> Proposal:
    """Propose the most valuable nodes; see `models.trees`."""
    least = math.log(params.threshold) if params.threshold else -math.inf
    tokens: list[int] = []
    parents: list[int] = []
    values = {-1: 0.0}  # logarithms
    below: dict[int, list[int]] = {-1: []}  # chosen children of each chosen node
    children: dict[int, list[tuple[float, int]]] = {}  # value and token, the likeliest first, where the draft was asked
    heap: list[tuple[float, int, int]] = []  # value, negative; parent; rank
    unasked, device = [-1], torch.device("cpu")

    def offer(parent: int, rank: int) -> None:
        if rank < len(children[parent]) and children[parent][rank][0] > -math.inf:
            heapq.heappush(heap, (-children[parent][rank][0], parent, rank))

    while len(tokens) < num_tokens:
        best = -heap[0][0] if heap else -math.inf
        reach = max((values[node] for node in unasked), default=-math.inf)
        if max(best, reach) < least or max(best, reach) == -math.inf:
            break
        if reach > best:
            log_probs = expand(tokens, parents, unasked)
            device, likeliest = log_probs.device, log_probs.topk(min(num_tokens, log_probs.shape[-1]))
            for node, gains, ids in zip(unasked, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
                children[node] = [(values[node] + gain, token) for gain, token in zip(gains, ids, strict=True)]
                offer(node, 0)
            unasked = []
            continue
        _, parent, rank = heapq.heappop(heap)
        offer(parent, rank + 1)
        node = len(tokens)
        values[node], token = children[parent][rank]
        below[parent].append(node)
        below[node] = []
        tokens.append(token)
        parents.append(parent)
        unasked.append(node)
    in_levels = below[-1]
    for node in in_levels:
        in_levels += below[node]
    numbers = {-1: -1} | {node: number for number, node in enumerate(in_levels)}
    return Proposal(
        torch.tensor([[tokens[node] for node in in_levels]], dtype=torch.int64, device=device),
        tuple(numbers[parents[node]] for node in in_levels),
    )
