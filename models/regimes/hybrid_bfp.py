"""Hybrid block floating point: dot products of integers that share exponents, everything else in float32.

Inputs, weights and output gradients of a linear layer are cut into tiles of 24 × 24; a tile has one exponent, and each
element a mantissa of `mantissa_bits`. The three products of training,

    y = x̂ · ŵᵀ,    ∂x = ĝ · ŵ,    ∂w = ĝᵀ · x̂,

so add integer products within a tile and floats across tiles. So do the output matrix and the two products inside of
attention, whose tiles stay within one head of one document. The weights themselves are kept with the wider mantissa of
`wide_bits`, which the update is rounded to.

What a reader of the paper would not expect: all three operands are tiled in two dimensions, so that each sums along
tiles in both products it takes part in; the paper tiles weights and gives each training input one exponent. Mantissas
are of the magnitude, the sign is one bit more, as in the authors' emulator; a tile's exponent is the least with which
its largest magnitude fits, so nothing saturates. An embedding that is the output matrix too is kept as wide as that.
`finish` leaves the wide weights in the model, which computes in floats; `answering` multiplies blocks again.
"""

from contextlib import AbstractContextManager
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.numbers import block_floating_point
from models.core.layers.products import ProductRegime, on_gradient, straight_through
from models.params import BaseParams

PAPER = "arXiv:1804.01526, sections 4 and 5"
CHANGES = ("products",)


class Params(BaseParams):
    """Settings; the defaults are the paper's HBFP8_16."""

    name: Literal["hybrid_bfp"] = "hybrid_bfp"
    mantissa_bits: int = Field(8, ge=1, le=23, description="in products, without the sign.")
    wide_bits: int = Field(16, ge=1, le=23, description="of the weights that are updated, without the sign.")
    tile: int = Field(24, ge=1, description="side of the square tiles that share an exponent.")
    stochastic: bool = Field(False, description="round stochastically instead of to the nearest.")

    @model_validator(mode="after")
    def _wider(self) -> "Params":
        if self.wide_bits < self.mantissa_bits:
            raise ValueError(f"wide_bits must be at least mantissa_bits, {self.mantissa_bits}; got {self.wide_bits}")
        return self


CORNERS = (Params(mantissa_bits=2, wide_bits=4, stochastic=True),)


class Hooks(ProductRegime):
    """`rng` rounds if asked to. Figure: `flushed_share` of non-zero gradients that round to zero."""

    EVERYWHERE = True

    params: Params

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        super().start(model, num_steps)
        self.after_step(model)

    @torch.no_grad()
    def after_step(self, model: PreTrainedModel) -> None:
        for weight in self.weights():
            weight.copy_(self._blocks(weight, self.params.wide_bits))

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        output = functional.linear(straight_through(inputs, self._narrow), straight_through(weight, self._narrow))
        return on_gradient(output, lambda gradient: self._counted(gradient, self._narrow(gradient)))

    def multiply_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        output = straight_through(left, self._matrices) @ straight_through(right, self._matrices).mT
        return on_gradient(output, lambda gradient: self._counted(gradient, self._matrices(gradient)))

    def answering(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        return self.multiplying(model, self.multiply)

    def _counted(self, gradient: Tensor, narrow: Tensor) -> Tensor:
        num_before = gradient.count_nonzero()
        self.count("flushed_share", num_before - narrow.count_nonzero(), num_before)
        return narrow

    def _narrow(self, values: Tensor) -> Tensor:
        return self._blocks(values, self.params.mantissa_bits)

    def _blocks(self, values: Tensor, mantissa_bits: int) -> Tensor:
        return self._round(values.flatten(0, -2), mantissa_bits).view(values.shape)

    def _matrices(self, values: Tensor) -> Tensor:
        """[..., R, C], each matrix by itself."""
        return self._round(values, self.params.mantissa_bits)

    def _round(self, values: Tensor, mantissa_bits: int) -> Tensor:
        rng = self.rng if self.params.stochastic else None
        return block_floating_point(values, mantissa_bits, self.params.tile, rng)[0]
