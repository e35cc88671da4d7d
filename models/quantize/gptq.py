"""GPTQ: round one column after the other, and let the columns to come make up for each column's error.

With H = 2·XᵀX and U the upper Cholesky factor of its inverse, column j is rounded and every later column k loses
(w_j − q_j) / U_jj · U_jk, which is the best that least squares can do. Blocks of 128 columns collect their updates.

A group's scale is taken when its first column is reached, from weights as they have become. With `act_order` columns
come in falling order of H's diagonal, and a group's scale is taken beforehand from the given weights, because its
columns are far apart then; engines need no permutation. 1% of the diagonal's mean is added to it; a feature that
calibration never saw is rounded to nearest, where the authors' code makes it 0. A weight of exactly 0 was pruned and
stays so; what the columns before it ask of it goes to those after it (arXiv:2301.00774, section 3.5).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.core.layers import integers
from models.core.layers.integers import Integers
from models.core.layers.linears import Gram, calibrate, inverse_factor
from models.quantize import BLOCK, Grid, Quantized, assemble, check, check_documents

PAPER = "arXiv:2210.17323, algorithm 1"
CALIBRATED = True
STORED = compressed.PACKED


class Params(Grid):
    """The grid and the order."""

    name: Literal["gptq"] = "gptq"
    damping: float = Field(0.01, gt=0, lt=1, description="share of the diagonal's mean that is added to it.")
    act_order: bool = Field(False, description="whether columns of large inputs are rounded first.")


CORNERS = (Params(group_size=32, symmetric=False),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Round weights block by block on the inputs that come through the rounded ones; see `models.quantize`."""
    check(model, params.group_size)
    check_documents(documents)
    parts = {}

    def visit(name: str, layer: nn.Linear, read: Gram) -> None:
        rounded = solve(layer.weight, read, params)
        layer.weight.copy_(rounded.floats())
        parts[name] = compressed.packed_parts(rounded, params.bits)

    calibrate(model, documents, Gram, visit)
    return assemble(model, parts, params.scheme)


def solve(weight: Tensor, inputs: Gram, params: Params) -> Integers:
    """Round one layer, whose weight [O, I] is left unchanged; ValueError if inputs are not as wide."""
    if len(inputs.matrix) != weight.shape[-1]:
        raise ValueError(f"inputs have width {len(inputs.matrix)}, the layer takes {weight.shape[-1]}")
    width, size = weight.shape[1], params.group_size
    hessian = 2 * inputs.matrix
    seen = hessian.diagonal()
    order = seen.argsort(descending=True) if params.act_order else torch.arange(width, device=weight.device)
    factor = inverse_factor(hessian[order][:, order], params.damping)
    left, columns = weight.detach().float()[:, order], order.tolist()
    held = (weight == 0)[:, order]
    scales, zeros = integers.fit(weight, params.bits, size, params.symmetric, torch.bfloat16)
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = torch.empty_like(left[:, start:stop])
        for place in range(start, stop):
            column = columns[place]
            group = column // size
            if not params.act_order and column % size == 0:
                group_of = slice(place, place + size)  # never reaches into the next block
                fresh = left[:, group_of].masked_fill(held[:, group_of], 0)
                scale, zero = integers.fit(fresh, params.bits, None, params.symmetric, torch.bfloat16)
                scales[:, group : group + 1] = scale
                if zeros is not None and zero is not None:
                    zeros[:, group : group + 1] = zero
            own = scales[:, group : group + 1], None if zeros is None else zeros[:, group : group + 1]
            wanted = left[:, place : place + 1].masked_fill(held[:, place : place + 1], 0)
            rounded = integers.encode(wanted, *own, params.bits)
            values[:, column] = rounded.values[:, 0]
            error = (left[:, place] - rounded.floats()[:, 0]) / factor[place, place]
            left[:, place:stop] -= error[:, None] * factor[place, place:stop]
            errors[:, place - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return Integers(values, scales, zeros)
