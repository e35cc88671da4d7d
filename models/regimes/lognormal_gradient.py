"""Lognormal gradients: number format and pruning threshold of output gradients from a lognormal fit of each.

The logarithms of a gradient's magnitudes are close to normal with mean μ and standard deviation σ. From these two come

- the scale: the largest number of the format is exp(μ + σ·Φ⁻¹((n − ⅜) / (n + ¼))), Blom's expected largest of n;
- the split of `num_bits` into sign, exponent and mantissa: the one of least expected relative error E|q(x) − x| / x,
  which has a closed form (`expected_error`): exponent bits pay while σ is wide, mantissa bits after;
- the threshold α of stochastic pruning for a wanted `sparsity` S, from
  S = Φ((ln α − μ)/σ) − exp(μ + σ²/2)/α · Φ((ln α − μ)/σ − σ).

Stochastic pruning leaves magnitudes from α on, and turns a smaller x into α·sign(x) with probability |x|/α, else into
zero; rounding is stochastic too. Both keep the mean, but for what is beyond the largest number: `clipped_share`.

What a reader of the paper would not expect: rounding is stochastic, so the error of the normal numbers is a third above
that of rounding to the nearest, and formats have subnormals. The scale is one float32 a tensor and, as the split,
fitted anew in each backward pass; the authors' code measures in some epochs and keeps it. With `scale` "maximum" the
largest magnitude is the largest number, and nothing is clipped. Exact zeroes, as on padding, are no part of the fit,
and `exponent_bits` 1 has equal steps: the uniform format to compare with.
"""

import math
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from models.core.layers.numbers import lowest_exponent, minifloat
from models.core.layers.products import ProductRegime, on_gradient
from models.params import BaseParams, require_unsaid

PAPER = "arXiv:2006.08173, sections 4 and 5; the expected maximum by Blom, 1958"
CHANGES = ("products",)
OFF = 32
NORMAL = NormalDist()
LN2 = math.log(2)
SAMPLE = 4096  # magnitudes that the fit's distance is measured on


class Params(BaseParams):
    """Settings."""

    name: Literal["lognormal_gradient"] = "lognormal_gradient"
    num_bits: int = Field(6, ge=2, le=OFF, description="of a gradient, the sign included; 32 rounds nothing.")
    exponent_bits: int | None = Field(
        None, ge=1, le=7, description="of them; None takes the split that the fit prefers."
    )
    sparsity: float = Field(
        0.0, ge=0, lt=1, description="share of a gradient that pruning sets to zero; 0 prunes nothing."
    )
    scale: Literal["fit", "maximum"] = Field("fit", description="where the largest number comes from.")

    @model_validator(mode="after")
    def _fits(self) -> "Params":
        if 16 < self.num_bits != OFF:
            raise ValueError(f"num_bits must be 2 to 16, or {OFF} for no rounding; got {self.num_bits}")
        if self.num_bits == OFF:
            require_unsaid(self, ["exponent_bits", "scale"], self.name, f"num_bits is {OFF}")
        if self.exponent_bits is not None and self.exponent_bits > self.num_bits - 1:
            raise ValueError(f"exponent_bits must be less than num_bits, {self.num_bits}; got {self.exponent_bits}")
        return self


CORNERS = (Params(sparsity=0.5, scale="maximum"),)


class Fit(NamedTuple):
    """Mean and standard deviation of the natural logarithms of `size` magnitudes."""

    mu: float
    sigma: float
    size: int


class Hooks(ProductRegime):
    """`rng` prunes and rounds.

    Figures: means of `sigma`, `exponent_bits` and `fit_distance` (Kolmogorov-Smirnov, of a sample) over the gradients;
    `clipped_share`, and `zero_share` of what was not zero.
    """

    params: Params

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return on_gradient(functional.linear(inputs, weight), self._compress)

    def _compress(self, gradient: Tensor) -> Tensor:
        logs = gradient[gradient != 0].abs().log()
        if not len(logs):
            return gradient
        found = fit(logs)
        self.count("sigma", found.sigma)
        self.count("fit_distance", fit_distance(logs, found))
        kept = gradient
        if self.params.sparsity:
            kept = prune(kept, threshold(found, self.params.sparsity), self.rng)
        if self.params.num_bits < OFF:
            largest = expected_largest(found) if self.params.scale == "fit" else float(kept.abs().max().log())
            kept = self._round(kept, found, largest)
        self.count("zero_share", len(logs) - kept.count_nonzero(), len(logs))
        return kept

    def _round(self, gradient: Tensor, found: Fit, largest: float) -> Tensor:
        exponent_bits = self.params.exponent_bits or best_split(found, self.params.num_bits, largest)
        mantissa_bits = self.params.num_bits - 1 - exponent_bits
        self.count("exponent_bits", exponent_bits)
        # With the largest number at 2 − 2^−m of the scale, the top power of two is the scale itself.
        scale = math.exp(largest) / (2 - 2.0**-mantissa_bits)
        self.count("clipped_share", (gradient.abs() > math.exp(largest)).sum(), gradient.numel())
        return minifloat(gradient / scale, exponent_bits, mantissa_bits, 0, self.rng) * scale


def fit(logs: Tensor) -> Fit:
    """Fit the [n] logarithms of magnitudes, n at least 1."""
    sigma, mu = torch.std_mean(logs.double(), correction=0)
    return Fit(float(mu), max(float(sigma), 1e-6), len(logs))


def fit_distance(logs: Tensor, found: Fit) -> float:
    """Return the largest gap between the distribution of (a sample of) the logarithms and the fit's."""
    ranked = logs[:: -(-len(logs) // SAMPLE)].double().sort().values
    says = torch.special.ndtr((ranked - found.mu) / found.sigma)
    steps = torch.arange(len(ranked) + 1, device=logs.device) / len(ranked)
    return float(torch.maximum((says - steps[:-1]).abs(), (says - steps[1:]).abs()).max())


def expected_largest(found: Fit) -> float:
    """Return the logarithm of the largest of so many magnitudes, as Blom expects it."""
    return found.mu + found.sigma * NORMAL.inv_cdf((found.size - 0.375) / (found.size + 0.25))


def threshold(found: Fit, sparsity: float) -> float:
    """Return the α whose expected share of zeroes is `sparsity`, in (0, 1)."""
    low, high = found.mu - 40 * found.sigma - 40, found.mu + 40 * found.sigma + 40
    for _ in range(80):  # halves the bracket beyond float64's precision
        middle = (low + high) / 2
        low, high = (middle, high) if expected_sparsity(found, middle) < sparsity else (low, middle)
    return math.exp(low)


def expected_sparsity(found: Fit, log_threshold: float) -> float:
    """Return the share of magnitudes that stochastic pruning below e^log_threshold sets to zero."""
    return _moment(found, 0, -math.inf, log_threshold) - _moment(found, 1, -math.inf, log_threshold, log_threshold)


def prune(gradient: Tensor, least: float, rng: torch.Generator) -> Tensor:
    """Keep magnitudes from `least` on; make of a smaller x least·sign(x) with probability |x| / least, else 0."""
    draws = torch.rand(gradient.shape, generator=rng, device=rng.device).to(gradient.device)
    magnitudes = gradient.abs()
    raised = torch.where(draws * least < magnitudes, least * gradient.sign(), 0)
    return torch.where(magnitudes >= least, gradient, raised)


def best_split(found: Fit, num_bits: int, largest: float) -> int:
    """Return the exponent bits of least expected relative error; e^largest is the largest number."""
    choices = range(1, min(num_bits - 1, 7) + 1)
    return min(choices, key=lambda bits: expected_error(found, bits, num_bits - 1 - bits, largest))


def expected_error(found: Fit, exponent_bits: int, mantissa_bits: int, largest: float) -> float:
    """Return E|q(x) − x| / x of lognormal magnitudes that are rounded stochastically, e^largest the largest number."""
    top = largest - math.log(2 - 2.0**-mantissa_bits)
    normal = top + LN2 * lowest_exponent(exponent_bits, 0)
    step = normal - LN2 * mantissa_bits
    # Between two neighbours the mean error is a third of their distance. Below the first step x becomes it with
    # probability x/step, else 0.
    of_normals = 2.0**-mantissa_bits / (6 * LN2) * _moment(found, 0, normal, largest)
    of_subnormals = _moment(found, -1, step, normal, -step) / 3
    below = 2 * (_moment(found, 0, -math.inf, step) - _moment(found, 1, -math.inf, step, step))
    above = _moment(found, 0, largest, math.inf) - _moment(found, -1, largest, math.inf, -largest)
    return of_normals + of_subnormals + below + above


def _moment(found: Fit, power: int, low: float, high: float, shift: float = 0.0) -> float:
    """Return E[x^power; low < ln x < high] · e^−shift; the shift keeps it from overflowing."""
    ends = ((end - found.mu) / found.sigma - power * found.sigma for end in (low, high))
    below, above = (NORMAL.cdf(end) for end in ends)
    if above == below:
        return 0.0
    return math.exp(power * found.mu + (power * found.sigma) ** 2 / 2 - shift) * (above - below)
