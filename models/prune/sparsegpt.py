"""SparseGPT: prune column by column, and let the weights further right make up for each one that goes.

With H = XᵀX + λ · mean(diag XᵀX) · 1 and U the upper Cholesky factor of its inverse, UᵀU = H⁻¹, zeroing w_j costs
w_j² / U_jj², and the columns k ≥ j of that row take −(w_j / U_jj) · U_jk. Row j of U is, up to U_jj, column j of the
inverse of H without the columns before j: those are done and change no more.

The mask is not chosen at once: each block of `block_size` columns chooses its own from the weights as the columns
before it have left them (the paper's Bs), over all rows of the block together; groups of N:M choose when their first
column is reached. A feature that is zero in all of calibration has its weights zeroed, in front of the choice.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram, inverse_factor
from models.params import BaseParams
from models.prune import require_inputs

PAPER = "arXiv:2301.00774, algorithm 1"
CALIBRATED = True


class Params(BaseParams):
    """The paper's settings.

    Attributes:
        block_size: columns whose mask is chosen together; updates of later ones wait for the end of a block.
        dampening: λ, what is added to H's diagonal as a share of its mean.
    """

    name: Literal["sparsegpt"] = "sparsegpt"
    block_size: int = Field(128, ge=1)
    dampening: float = Field(0.01, gt=0)


def prune(weight: Tensor, inputs: Gram, pattern: Pattern, params: Params) -> Tensor:
    """Zero weights of one linear layer and update the others; see `models.prune`. ValueError also where inputs are
    fewer tokens than a block, or the pattern does not divide the block."""
    require_inputs(weight, inputs, min(params.block_size, weight.shape[1]))
    if pattern.group is not None and params.block_size % pattern.group:
        raise ValueError(f"block_size is {params.block_size}, which {pattern.group} of {pattern} does not divide")
    pruned = weight.float()
    factor = inverse_factor(inputs.matrix, params.dampening)
    pruned = pruned.masked_fill(inputs.matrix.diagonal() == 0, 0)
    for start in range(0, pruned.shape[1], params.block_size):
        stop = min(start + params.block_size, pruned.shape[1])
        block, errors = _prune_block(pruned[:, start:stop], factor[start:stop, start:stop], pattern)
        pruned[:, start:stop] = block
        pruned[:, stop:] -= errors @ factor[start:stop, stop:]
    return pruned.to(weight.dtype)


def _prune_block(block: Tensor, factor: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Prune columns [O, B] by U's own part [B, B].

    Returns:
        the block [O, B], and the errors [O, B] that later columns make up for.
    """
    block, errors = block.clone(), torch.zeros_like(block)
    scale = factor.diagonal()
    keep = torch.ones_like(block, dtype=torch.bool)
    if pattern.group is None:
        keep = pattern.keep((block / scale).square(), over="layer")
    for column in range(block.shape[1]):
        if pattern.group is not None and column % pattern.group == 0:
            group = slice(column, column + pattern.group)
            keep[:, group] = pattern.keep((block[:, group] / scale[group]).square(), over="row")
        errors[:, column] = block[:, column].masked_fill(keep[:, column], 0) / scale[column]
        block[:, column:] -= errors[:, column, None] * factor[column, column:]
    return block.masked_fill(~keep, 0), errors
