"""The mean of a metric over seeds, and how far off it may be, where a seed gives a figure or one for each document.

Documents tell more than seeds do: a seed reads a dozen of them, the same ones for every row. They are the unit as long
as seeds differ no more from each other than their documents make them; else something else that a seed draws, such as
the order of training, counts too, and seeds are the unit, as they are where a metric has no documents. Values are taken
as normal. Of one seed only documents can be told.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, variance
from typing import NamedTuple, Self

from scipy.stats import t as student

from models.core.evaluation import perplexity as text
from models.core.evaluation.perplexity import Likelihood


class Mean(float):
    """A weighted mean over documents that keeps what each of them gave.

    Attributes:
        documents: one number each; their plain mean is this one, and they vary as a ratio of sums does to first order.
    """

    documents: tuple[float, ...]

    def __new__(cls, values: Sequence[float], weights: Sequence[float] | None = None) -> Self:
        """Take the mean of one value a document, which count for their weights, if given; ValueError for none."""
        weights = [1.0] * len(values) if weights is None else weights
        if not values:
            raise ValueError("a mean over documents needs at least one")
        mean = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
        found = super().__new__(cls, mean)
        found.documents = tuple(mean + w * (x - mean) / fmean(weights) for w, x in zip(weights, values, strict=True))
        return found


class Spread(NamedTuple):
    """A mean over seeds, each of which counts for as much, and the variance of one seed's mean.

    `freedom` are degrees of freedom that each seed's documents give; 0 where seeds are the unit.
    """

    mean: float
    variance: float
    num_seeds: int
    freedom: float = 0.0

    def reach(self, confidence: float, num_seeds: int | None = None) -> float:
        """Return what Student's interval of so many seeds reaches to either side, infinite where nothing tells."""
        count = num_seeds or self.num_seeds
        freedom = self.freedom * count or count - 1
        if freedom < 1:
            return math.inf
        return _quantile(confidence, freedom) * math.sqrt(self.variance / count)


def spread(values: Sequence[float]) -> Spread:
    """Sum up a metric; `values` are one a seed, all of them of type `Mean` where documents are to be told."""
    mean, count = fmean(values), len(values)
    by_seed = variance(map(float, values)) if count > 1 else math.nan
    documents = [value.documents for value in values if isinstance(value, Mean) and len(value.documents) > 1]
    if len(documents) < count:
        return Spread(mean, by_seed, count)
    freedom = sum(map(len, documents)) - count
    within = sum(variance(of_seed) * (len(of_seed) - 1) for of_seed in documents) / freedom
    by_document = within * fmean(1 / len(of_seed) for of_seed in documents)
    return Spread(mean, by_seed, count) if by_seed > by_document else Spread(mean, by_document, count, freedom / count)


@lru_cache
def _quantile(confidence: float, freedom: float) -> float:
    return float(student.ppf((1 + confidence) / 2, freedom))


def differences(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Subtract a baseline seed by seed, and document by document where both are `Mean`, of equally many."""
    return [_difference(value, base) for value, base in zip(values, baseline, strict=True)]


def _difference(value: float, base: float) -> float:
    if not (isinstance(value, Mean) and isinstance(base, Mean)):
        return value - base
    return Mean([one - other for one, other in zip(value.documents, base.documents, strict=True)])


def nats_per_token(scores: Sequence[Likelihood]) -> Mean:
    """Return the mean over all tokens, so that a long document counts for more."""
    return Mean([one.nats / one.num_tokens for one in scores], [float(one.num_tokens) for one in scores])


def perplexity(scores: Sequence[Likelihood]) -> Mean:
    """Return e to the mean nats a token; a document gives what it adds to that, to first order."""
    nats, whole = nats_per_token(scores), text.perplexity(scores)
    return Mean([whole * (1 + one - nats) for one in nats.documents])
