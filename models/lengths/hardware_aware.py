"""Sequoia's hardware-aware size: as many nodes of its optimal tree as pay on this machine.

A tree of N nodes is expected to have A(N) tokens accepted (`models.trees.sequoia`), and its step takes T(N), of N + 1
rows of the target, what the draft has read beside them, and a pass of the draft a level, as measured while requests
run. The size is the one with the highest

    (1 + A(N)) / T(N),   N from 0 to the limit.

Sizes that double are tried first, as long as the engine has not timed them: between them the target's time is linear.
"""

from itertools import takewhile
from typing import Literal

from pydantic import Field

from models.lengths import View
from models.params import BaseParams
from models.trees import sequoia

PAPER = "arXiv:2402.12374, section 3.3"


class Params(BaseParams):
    """Which tree is grown."""

    name: Literal["hardware_aware"] = "hardware_aware"
    tree: sequoia.Params = Field(
        sequoia.Params(), description="the draft's acceptance by rank, and how deep the tree may be."
    )


def num_draft_tokens(view: View, params: Params) -> int:
    """Return how many nodes are worth their rows and passes, or one of the sizes that were not timed yet."""
    sizes = [0, *takewhile(lambda size: size < view.limit, (1 << power for power in range(30))), view.limit]
    timed = {round(rows) for curve in view.cost.curves for rows in curve.rows}
    # A draft may propose less than it was asked for, so each sequence asks for a size once.
    if len(view.steps) < len(sizes) and view.num_rows(sizes[len(view.steps)]) not in timed:
        return sizes[len(view.steps)]
    line = view.cost.line(1)
    if line is None or line.pass_ms is None:
        return view.limit
    speeds = []
    for size in range(view.limit + 1):
        shape = sequoia.shape(size, params.tree)
        tokens = 1 + sequoia.expected_accepted(shape, params.tree.acceptance)
        speeds.append(tokens / line.step_ms(view.num_rows(len(shape.parents)), len(shape.levels)))
    return max(range(view.limit + 1), key=speeds.__getitem__)
