"""DySpec's tree: of all trees of N nodes the one that its draft expects most accepted tokens of.

Taken for the chance that a token is accepted, the draft's probabilities make a node worth v, their product on its path,
and a tree Σ v accepted tokens. No node is worth more than its parent, so the N most valuable nodes are a tree, and the
best of its size, however deep or wide.

The paper takes them from a heap one by one, and asks the draft what follows each, in N passes. The same nodes are found
in about as many as the tree is deep: a pass says what follows all of the N best so far that it was not asked about and
that are worth more than the last of them, because less can't lead into the tree.

The paper draws the children of a node without replacement; they are the likeliest here, as in all trees. Unlike
`dynamic` it has no bound of depth and width.
"""

import heapq
import math
from typing import Literal

import torch
from pydantic import Field

from models.core.drafting.proposal import Proposal
from models.params import BaseParams
from models.trees import Expand, proposed

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
    bar = math.log(params.threshold) if params.threshold else -math.inf
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []  # logarithms
    best: list[int] = []
    unasked, device = [-1], torch.device("cpu")
    while unasked and num_tokens:
        log_probs = expand(tokens, parents, unasked)
        device, first = log_probs.device, len(tokens)
        likeliest = log_probs.topk(min(num_tokens, log_probs.shape[-1]))
        for parent, gains, ids in zip(unasked, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
            reached = values[parent] if parent >= 0 else 0.0
            worth = [(token, reached + gain) for token, gain in zip(ids, gains, strict=True)]
            kept = [(token, value) for token, value in worth if value >= bar and value > -math.inf]
            tokens += [token for token, _ in kept]
            parents += [parent] * len(kept)
            values += [value for _, value in kept]
        # Of equal ones the first, so that no child goes before its parent.
        best = heapq.nsmallest(num_tokens, range(len(tokens)), key=lambda node: (-values[node], node))
        least = values[best[-1]] if len(best) == num_tokens else -math.inf
        unasked = sorted(node for node in best if node >= first and values[node] > least)
    return proposed(best, tokens, parents, device)
