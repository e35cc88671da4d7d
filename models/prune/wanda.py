"""Wanda: score each weight by |w| times the L2 norm of the input feature it multiplies; no weight is updated.

Weights compete within a row, that is for one output, which the paper found to matter as much as the score.
"""

from typing import Literal

from torch import Tensor

from models.checkpoints.sparsity import Pattern
from models.layers.linears import Gram
from models.params import BaseParams
from models.prune import require_inputs

PAPER = "arXiv:2306.11695, equation 1"
CALIBRATED = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["wanda"] = "wanda"


def prune(weight: Tensor, inputs: Gram, pattern: Pattern, params: Params) -> Tensor:
    """Zero the low-scored weights of one linear layer.

    Args:
        weight: [O, I], left unchanged.
        inputs: of calibration.
        pattern: the weights of a row compete, or those of a group.
        params: nothing to set.

    Returns:
        [O, I], dtype of `weight`.

    Raises:
        ValueError: `inputs` don't fit `weight`, or `pattern` does not fit the layer.
    """
    require_inputs(weight, inputs)
    scores = weight.float().abs() * inputs.matrix.diagonal().sqrt()
    return weight.masked_fill(~pattern.keep(scores, over="row"), 0)
