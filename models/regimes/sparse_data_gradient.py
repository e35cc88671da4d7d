"""Sparse data gradient: of every four neighbours of the output gradient two take part in the data gradient's product.

With g the gradient of a layer's output and P(g) the same with the two smaller of every four magnitudes set to zero,

    ∂x = P(g) · W,    ∂W = gᵀ · x,

so that hardware with 2:4 sparsity does one of the three products of training in half the time. With `preserve_l1` what
is kept of a group is scaled by the sum of the group's magnitudes over the sum of the kept ones.

What a reader of the paper would not expect: groups lie along the layer's outputs, the dimension that the product sums
over (the paper's channels); a tie keeps the two that come first in the sort, whichever they are, but always two. The
product is computed densely here, so nothing is saved.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from models.core.layers.products import ProductRegime, linear
from models.params import BaseParams

PAPER = "arXiv:2202.00774"
CHANGES = ("products",)
GROUP, KEPT = 4, 2


class Params(BaseParams):
    """Settings."""

    name: Literal["sparse_data_gradient"] = "sparse_data_gradient"
    preserve_l1: bool = Field(False, description="scale what is kept so that each group's sum of magnitudes stays.")


CORNERS = (Params(preserve_l1=True),)


class Hooks(ProductRegime):
    """Figure: `kept_l1`, the share of the gradient's magnitude before scaling."""

    params: Params

    def require(self, name: str, layer: nn.Linear) -> None:
        if layer.out_features % GROUP:
            raise ValueError(f"layer {name} has {layer.out_features} outputs; 2:4 sparsity takes a multiple of {GROUP}")

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return linear(inputs, weight, self.data_gradient, lambda inputs, gradient: gradient.T @ inputs)

    def data_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """[..., O] and [O, I] → [..., I]."""
        kept = keep_two_of_four(gradient)
        self.count("kept_l1", kept.abs().sum(), gradient.abs().sum())
        return (preserve_l1(gradient, kept) if self.params.preserve_l1 else kept) @ weight


def keep_two_of_four(gradient: Tensor) -> Tensor:
    """Return [..., O] with the two smaller magnitudes of every four neighbours set to zero."""
    groups = gradient.unflatten(-1, (-1, GROUP))
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.abs().topk(KEPT, dim=-1).indices, True)
    return torch.where(kept, groups, 0).flatten(-2)


def preserve_l1(gradient: Tensor, kept: Tensor) -> Tensor:
    """Scale each group of `kept` to the sum of magnitudes that it has in `gradient`; a group of zeroes stays."""
    groups = kept.unflatten(-1, (-1, GROUP))
    wanted = gradient.unflatten(-1, (-1, GROUP)).abs().sum(-1, keepdim=True)
    left = groups.abs().sum(-1, keepdim=True)
    return torch.where(left > 0, groups * (wanted / left), 0).flatten(-2)
