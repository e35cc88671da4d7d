"""DoReFa: weights, activations and gradients of few bits, each rounded on its way into a linear layer's products.

With q_k rounding [0, 1] to k bits, per layer

    weights      s·(2·q_k(tanh(w) / (2s) + ½) − 1), s = max |tanh(w)|;    1 bit: sign(w) · mean |w|
    activations  x clipped to its scale c and rounded to 2^k − 1 values;    1 bit: sign(x) · mean |x|
    gradients    2m·(q_k(g / (2m) + ½ + noise) − ½), m = max |g|, noise uniform in ±½ / (2^k − 1)

and rounding passes the gradient on as if it were not there (straight-through).

What a reader of the paper would not expect: the paper's weights fill [−1, 1] and its activations lie in [0, 1], because
each layer is followed by batch normalisation and a bounded activation. A transformer has neither. So weights are scaled
back by s, which makes them tanh(w) for large k, and activations, signed and unbounded, are scaled by one number a
tensor, c = `activation_clip` times their root mean square, or their largest magnitude if that is less; by default the
factor of least squared error on normal values (`normal_clip`: 1.2 at 2 bits, 3.6 at 8). m is taken per document, the
paper's instance of a mini-batch. The noise makes the rounding of gradients unbiased; a gradient of exactly 0, as on
padding, stays 0 although 0 is none of the 2^k values. Embedding and output matrix keep full precision, as the paper's
first and last layer do, and so do weights that are frozen. `finish` leaves the rounded weights in the model, which
computes with those and with unrounded activations; `answering` rounds these too.
"""

from contextlib import AbstractContextManager
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.numbers import fixed_point, unit_interval
from models.core.layers.products import ProductRegime, on_gradient, straight_through
from models.params import BaseParams, unread

PAPER = "arXiv:1606.06160, sections 2.3 to 2.5"
CHANGES = ("products",)
OFF = 32
MOST = 16  # more would not be exact in float32


def _simulated(num_bits: int) -> int:
    if MOST < num_bits != OFF:
        raise ValueError(f"bits must be 1 to {MOST}, or {OFF} for none of it")
    return num_bits


Bits = Annotated[int, Field(ge=1), AfterValidator(_simulated)]


class Params(BaseParams):
    """Settings: bits, 1 to 16, or 32 for no rounding.

    Attributes:
        activation_clip: scale of activations in root mean squares of their tensor; None is `normal_clip`.
        weight_bits, activation_bits, gradient_bits: of each number; 32 rounds nothing.
    """

    name: Literal["dorefa"] = "dorefa"
    weight_bits: Bits = 8
    activation_bits: Bits = 8
    gradient_bits: Bits = 8
    activation_clip: float | None = Field(None, gt=0)
    _clip = unread(
        "activation_clip", when=lambda params: params.activation_bits == OFF, why=f"activation_bits is {OFF}"
    )


CORNERS = (Params(weight_bits=1, activation_bits=1, gradient_bits=1),)


class Hooks(ProductRegime):
    """`rng` draws the gradients' noise. Figure: `clipped_share` of the activations."""

    params: Params

    def __init__(self, params: Params, rng: torch.Generator) -> None:
        super().__init__(params, rng)
        self.clip = params.activation_clip or normal_clip(params.activation_bits)

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        params = self.params
        if params.activation_bits < OFF:
            inputs = self._activations(inputs)
        if weight.requires_grad:
            weight = quantize_weight(weight, params.weight_bits)
        output = functional.linear(inputs, weight)
        if params.gradient_bits == OFF:
            return output
        return on_gradient(output, lambda gradient: quantize_gradient(gradient, params.gradient_bits, self.rng))

    def _activations(self, inputs: Tensor) -> Tensor:
        scale = activation_scale(inputs.detach(), self.clip)
        self.count("clipped_share", (inputs.detach().abs() > scale).sum(), inputs.numel())
        return quantize_activation(inputs, self.params.activation_bits, scale)

    @torch.no_grad()
    def finish(self, model: PreTrainedModel) -> None:
        for weight in self.weights():
            weight.copy_(quantize_weight(weight, self.params.weight_bits))
        super().finish(model)

    def answering(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        # The weights were rounded at the end.
        few = self.params.activation_bits < OFF
        return self.multiplying(model, lambda x, w: functional.linear(self._activations(x) if few else x, w))


def quantize_weight(weight: Tensor, num_bits: int) -> Tensor:
    """Return [O, I] weights of `num_bits`, with gradient."""
    if num_bits == OFF:
        return weight
    if num_bits == 1:
        return straight_through(weight, lambda w: torch.where(w >= 0, 1.0, -1.0).to(w.dtype) * w.abs().mean())
    bounded = weight.tanh()
    scale = _positive(bounded.detach().abs().max())
    return straight_through(bounded, lambda w: scale * (2 * unit_interval(w / (2 * scale) + 0.5, num_bits) - 1))


def normal_clip(num_bits: int) -> float:
    """Return the scale, in standard deviations, at which rounding a normal variable has the least squared error."""
    values = torch.special.ndtri((torch.arange(4096, dtype=torch.float64) + 0.5) / 4096)
    scales: list[float] = torch.linspace(0.5, 6.0, 111, dtype=torch.float64).tolist()
    bits = min(max(num_bits, 2), MOST)  # one bit has no scale of its own, but a range of gradient
    return min(scales, key=lambda scale: float((fixed_point(values, bits, scale) - values).square().mean()))


def activation_scale(inputs: Tensor, clip: float) -> Tensor:
    """Return the scalar that activations are clipped to."""
    return _positive(torch.minimum(clip * inputs.square().mean().sqrt(), inputs.abs().max()))


def quantize_activation(inputs: Tensor, num_bits: int, scale: Tensor) -> Tensor:
    """Return activations of `num_bits`; what is clipped to `scale` has no gradient."""
    clipped = inputs.clamp(-scale, scale)
    if num_bits == 1:
        return straight_through(clipped, lambda x: torch.where(x >= 0, 1.0, -1.0).to(x.dtype) * x.abs().mean())
    return straight_through(clipped, lambda x: fixed_point(x, num_bits, scale))


def quantize_gradient(gradient: Tensor, num_bits: int, rng: torch.Generator) -> Tensor:
    """Round [B, ...] stochastically to the 2^num_bits values from −m to m, m the largest magnitude of each instance.
    Adding noise of ±½ step and rounding to the nearest is what stochastic rounding does."""
    largest = _positive(gradient.abs().amax(dim=tuple(range(1, gradient.ndim)), keepdim=True))
    kept = 2 * largest * (unit_interval(gradient / (2 * largest) + 0.5, num_bits, rng) - 0.5)
    return torch.where(gradient == 0, 0, kept)


def _positive(scale: Tensor) -> Tensor:
    return scale.clamp(min=torch.finfo(scale.dtype).tiny)
