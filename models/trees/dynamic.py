"""EAGLE-2's dynamic tree: expand where the draft is sure, then keep the nodes that are likeliest of all.

A node's value is the product of the draft's probabilities on its path, which estimates the chance that it is accepted.
Level by level the most valuable nodes get their likeliest tokens as children; at the end all nodes are ranked again by
value, and the best N are proposed. A parent is worth at least its children, so the best N are a tree. A node that is
not among the best N so far never will be, so no such node is expanded, and a pass of the draft reads at most N nodes.
"""

import math
from typing import Literal

import torch
from pydantic import Field

from models.core.drafting.proposal import Proposal
from models.params import BaseParams
from models.trees import Expand, proposed

PAPER = "arXiv:2406.16858, section 4"
BRANCHES = True


class Params(BaseParams):
    """How it expands."""

    name: Literal["dynamic"] = "dynamic"
    width: int = Field(4, ge=1, description="nodes of a level that are expanded, and children that each gets.")
    max_depth: int = Field(5, ge=1, description="levels, of which each takes a pass of the draft.")
    threshold: float = Field(
        0.0, ge=0, lt=1, description="nodes of less value than this are neither expanded nor proposed."
    )


def grow(expand: Expand, num_tokens: int, params: Params) -> Proposal:
    """Propose the most valuable nodes; see `models.trees`."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []  # logarithms
    least = math.log(params.threshold) if params.threshold else -math.inf

    def best() -> list[int]:
        worth = [node for node in range(len(tokens)) if values[node] >= least and values[node] > -math.inf]
        return sorted(worth, key=lambda node: (-values[node], node))[:num_tokens]

    device, open_nodes = torch.device("cpu"), [-1]
    for _ in range(min(params.max_depth, num_tokens)):
        log_probs = expand(tokens, parents, open_nodes)
        device, first = log_probs.device, len(tokens)
        likeliest = log_probs.topk(min(params.width, log_probs.shape[-1]))
        for parent, ids, gains in zip(open_nodes, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
            tokens += ids
            parents += [parent] * len(ids)
            values += [(values[parent] if parent >= 0 else 0.0) + gain for gain in gains]
        open_nodes = sorted([node for node in best() if node >= first][: params.width])
        if not open_nodes:
            break
    return proposed(best(), tokens, parents, device)
