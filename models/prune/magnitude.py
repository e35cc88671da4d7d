"""Magnitude: the smallest |w| of a layer become zero. It reads no data.

The share is of a layer and not of the whole model, which for language models is the better of the two (SparseGPT,
section 4).
"""

from typing import Literal

from torch import Tensor

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.params import BaseParams

PAPER = "arXiv:1506.02626"
CALIBRATED = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["magnitude"] = "magnitude"


def prune(weight: Tensor, inputs: Gram, pattern: Pattern, params: Params) -> Tensor:
    """Zero the smallest weights of one linear layer; all of them compete, or those of a group; see `models.prune`."""
    return weight.masked_fill(~pattern.keep(weight.float().abs(), over="layer"), 0)
