"""Wanda: score each weight by |w| times the L2 norm of the input feature it multiplies; no weight is updated.

Weights compete within a row, that is for one output, which the paper found to matter as much as the score.
"""

from typing import Literal

from torch import Tensor

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.params import BaseParams
from models.prune import require_inputs

PAPER = "arXiv:2306.11695, equation 1"
CALIBRATED = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["wanda"] = "wanda"


def prune(weight: Tensor, inputs: Gram, pattern: Pattern, params: Params) -> Tensor:
    """Zero the low-scored weights of one linear layer; those of a row compete, or of a group; see `models.prune`."""
    require_inputs(weight, inputs)
    scores = weight.float().abs() * inputs.matrix.diagonal().sqrt()
    return weight.masked_fill(~pattern.keep(scores, over="row"), 0)
