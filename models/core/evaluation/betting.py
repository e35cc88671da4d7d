"""A lower and an upper bound of a mean that may be looked at after every observation, by betting.

Whoever bets share b of a wealth of 1 that the mean of values in [−K, K] is above m has

    W(m) = Π_i (1 + b (x_i − m) / (m + K)) ^ w_i

after values x_i. If the mean is m or less, W is expected never to grow, and the chance that it ever reaches 1 / α is at
most α (Ville). So the smallest m at which it has not reached that bounds the mean from below, however often one looks.
Several shares are bet at once, each with a part of the wealth: large ones find large means soon, small ones small means
in the end.

- The shares never depend on what was seen. So values may have different means, as those of different drafts and kinds
  of traffic do: what is bounded is the weighted mean of the means that each value had given all before it (the
  arithmetic mean is above the geometric), and the order of values makes no difference.
- A value of weight w ≤ 1 counts as that part of a value; (1 + z)^w ≤ 1 + w z keeps the bound.
- Hence the weights of equal values are all that need be kept: a histogram, each value rounded down for the lower bound
  and up for the upper one.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from models.core.evaluation.acceptance import Floats
from models.types import Frozen, Positive

PAPER = "arXiv:2010.09686, sections 4.1 and 4.3, with bets held constant"

NUM_BINS = 2048  # even, so that 0 is the edge of a bin and stays itself
BETS = np.array([0.95, 0.5, 0.2, 0.08, 0.03])
PARTS = np.array([0.6, 0.16, 0.08, 0.08, 0.08])  # of the wealth; the large bet finds a small gain in windows of 50


def log_growth(values: Floats, weights: Floats, mean: float, bound: float) -> Floats:
    """Return [..., B] by how much the log of each bet's wealth grows, against a mean above −bound.

    Values [..., N] are in [−bound, bound], weights [..., N] in [0, 1].
    """
    odds = (values - mean) / (mean + bound)
    return np.stack([(weights * np.log1p(bet * odds)).sum(axis=-1) for bet in BETS], axis=-1)


def log_wealth(growth: Floats) -> Floats:
    """Return the log of the wealth over all bets, whose logs have grown by [..., B]: [...]."""
    return np.asarray(np.logaddexp.reduce(growth + np.log(PARTS), axis=-1))


class MeanTest(Frozen):
    """What is known of a mean: a value that goes on as values come in, and may be written down in between.

    Values are in [−bound, bound]; `counts` are bin to the weight of the values in it, bin 0 from −bound on.
    """

    bound: Positive
    counts: dict[Annotated[int, Field(ge=0, lt=NUM_BINS)], Positive] = Field(default_factory=dict)
    total: float = Field(0.0, allow_inf_nan=False)

    def after(self, values: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """Return the test with more values, each in [−bound, bound].

        Weights, by default 1, are in [0, 1] and chosen before the value was seen. ValueError if a value or weight is
        out of range.
        """
        shares = [1.0] * len(values) if weights is None else weights
        counts, total = dict(self.counts), self.total
        for value, share in zip(values, shares, strict=True):
            if not (abs(value) <= self.bound and 0 <= share <= 1):
                raise ValueError(f"wanted a value in ±{self.bound:g} and a weight in [0, 1], got {value} and {share}")
            # What is a bin's edge but for rounding belongs to the bin above.
            place = min(NUM_BINS - 1, math.floor((value / self.bound + 1) / 2 * NUM_BINS + 1e-9))
            total += share * value
            if share > 0:
                counts[place] = counts.get(place, 0.0) + share
        return self.model_copy(update={"counts": dict(sorted(counts.items())), "total": total})

    @property
    def mean(self) -> float:
        """Of the values so far; 0 without any."""
        return self.total / self.weight if self.counts else 0.0

    @property
    def weight(self) -> float:
        """Of all values together: how many whole ones they amount to."""
        return sum(self.counts.values())

    def log_wealth(self, mean: float = 0.0) -> float:
        """Return the log of what betting on a mean above `mean` has made of 1."""
        return float(log_wealth(log_growth(self._edges(), self._weights(), mean, self.bound)))

    def growth(self) -> Floats:
        """Return [B]: by how much the log of each bet on a mean above 0 has grown."""
        return log_growth(self._edges(), self._weights(), 0.0, self.bound)

    def lower(self, alpha: float) -> float:
        """Return the bound that the mean is above; wrong at any look with a chance of at most `alpha`."""
        return _lower(self._edges(), self._weights(), self.bound, alpha)

    def upper(self, alpha: float) -> float:
        """Return the bound that the mean is below; wrong at any look with a chance of at most `alpha`."""
        return -_lower(-self._edges() - 2 * self.bound / NUM_BINS, self._weights(), self.bound, alpha)

    def _edges(self) -> Floats:
        return self.bound * (2 * np.array(list(self.counts), dtype=np.float64) / NUM_BINS - 1)

    def _weights(self) -> Floats:
        return np.array(list(self.counts.values()), dtype=np.float64)


def _lower(values: Floats, weights: Floats, bound: float, alpha: float) -> float:
    """Return the smallest mean that the wealth is below 1 / alpha at; the larger the mean, the smaller the wealth."""
    low, high, wanted = -bound, bound, -math.log(alpha)
    while high - low > 1e-6 * bound:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if log_wealth(log_growth(values, weights, middle, bound)) >= wanted else (low, middle)
        )
    return low
