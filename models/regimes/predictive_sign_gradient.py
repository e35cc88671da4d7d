"""Predictive sign gradient: the sign of most weight gradients read off a product of few bits.

With x the inputs and g the output gradient as integers of `activation_bits` and `gradient_bits`, and x̂, ĝ their most
significant bits alone, the gradient of a weight is

    sign(ĝᵀx̂) where |ĝᵀx̂| ≥ τ, else sign(gᵀx),    τ = β · max |ĝᵀx̂|.

What a reader of the paper would not expect: each feature of x and g has a scale of its own, which moves no sign,
because with one for all a few loud features leave the others no bits and τ out of their reach. Only the weight
gradient's product has few bits here, the forward pass and the data gradient stay as they are (the paper adds 8-bit
training, which is another method). The paper steps by SignSGD; here the signs are given to the loop's AdamW, which
makes of gradients of one magnitude that same step with momentum. The signs of a matrix are divided by the root of their
number, because the loop clips the norm of all gradients and would otherwise shrink those of embedding and norms to
nothing. The most significant bits are rounded, not cut off, as in the authors' code, and the wider product is computed
everywhere, as is the exact one for `sign_agreement`: a simulation saves nothing.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from models.core.layers.products import ProductRegime, linear
from models.params import BaseParams

PAPER = "arXiv:1910.13349, section 3.3"
CHANGES = ("products", "weight gradients")


class Params(BaseParams):
    """Settings; the defaults are the paper's.

    Attributes:
        beta: share of the largest prediction from which a prediction is believed; 0 believes all.
        activation_bits: of the wider product, the sign included.
        gradient_bits: the same of the output gradient.
        activation_msb: the bits of them that predict.
        gradient_msb: the same of the output gradient.
    """

    name: Literal["predictive_sign_gradient"] = "predictive_sign_gradient"
    beta: float = Field(0.05, ge=0, le=1)
    activation_bits: int = Field(8, ge=2, le=16)
    gradient_bits: int = Field(16, ge=2, le=16)
    activation_msb: int = Field(4, ge=2)
    gradient_msb: int = Field(10, ge=2)

    @model_validator(mode="after")
    def _narrower(self) -> "Params":
        for kind in ("activation", "gradient"):
            most, bits = getattr(self, f"{kind}_msb"), getattr(self, f"{kind}_bits")
            if most > bits:
                raise ValueError(f"{kind}_msb must be at most {kind}_bits, {bits}; got {most}")
        return self


class Hooks(ProductRegime):
    """Figures: `predicted_share`, and `sign_agreement` with the exact product."""

    params: Params

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return linear(inputs, weight, torch.matmul, self.weight_gradient)

    def weight_gradient(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """[N, I] and [N, O] → [O, I]."""
        params = self.params
        low_inputs, wide_inputs = most_significant(inputs, params.activation_bits, params.activation_msb)
        low_gradient, wide_gradient = most_significant(gradient, params.gradient_bits, params.gradient_msb)
        signs, predicted = predict_signs(low_gradient.T @ low_inputs, wide_gradient.T @ wide_inputs, params.beta)
        self.count("predicted_share", predicted.sum(), predicted.numel())
        self.count("sign_agreement", (signs == (gradient.T @ inputs).sign()).sum(), signs.numel())
        side: float = signs.numel() ** 0.5
        return signs / side


def most_significant(values: Tensor, num_bits: int, num_high: int) -> tuple[Tensor, Tensor]:
    """Return `values` as integers of `num_bits`, sign included: first their `num_high` highest bits, then all.

    Each feature [N, features] is scaled so that its largest magnitude is 2^(num_bits−1) − 1; the high part is rounded
    to a multiple of 2^(num_bits−num_high) and kept within `num_high` bits.
    """
    top = 2 ** (num_bits - 1) - 1
    wide = (values * (top / values.abs().amax(0).clamp(min=torch.finfo(values.dtype).tiny * top))).round()
    unit, most = 2 ** (num_bits - num_high), 2 ** (num_high - 1) - 1
    return (wide / unit).round().clamp(-most, most) * unit, wide


def predict_signs(low: Tensor, wide: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the signs of `low` where it is at least `beta` of its maximum, else of `wide`; and where that was."""
    predicted = low.abs() >= beta * low.abs().max()
    return torch.where(predicted, low, wide).sign(), predicted
