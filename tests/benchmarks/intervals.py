"""Whether intervals of a window's gain hold what fresh requests of its traffic give: pure statistics, no model."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.core.evaluation.gate import Evidence
from models.core.evaluation.paired import Score
from models.core.learning.hidden import Sample
from models.types import Estimate

Scores = dict[str, Score]


class Mean(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float


class Split(NamedTuple):
    """One split of a log: the ids that it holds, and id to cluster and weight of those that judge."""

    log: list[str]
    judged: dict[str, tuple[str, float]]


def hold(
    splits: Sequence[Split],
    first: Scores,
    later: Scores,
    fresh: Sequence[Sample],
    shares: Mapping[str, float],
    num_draft_tokens: int,
) -> dict[str, float]:
    """Return how often the splits' intervals hold what the fresh requests outside of their logs give, and how they lie.

    Args:
        splits: of logs.
        first: id to the first draft's score.
        later: id to that of the draft that is held against it.
        fresh: requests; those in a split's log are no part of its truth.
        shares: domain to its share of the traffic.
        num_draft_tokens: K.

    Raises:
        ValueError: a log has nothing to be judged by.
    """
    if empty := sum(not one.judged for one in splits):
        raise ValueError(f"{empty} of {len(splits)} logs have no conversation to be judged by")
    held = []
    for one in splits:
        inside = set(one.log)
        rest = [sample for sample in fresh if sample.id not in inside]
        found = estimate(one.judged, first, later, shares, num_draft_tokens)
        held.append((found, mean_gain(rest, first, later, shares).value))
    return summary(held) | {
        "splits": len(splits),
        "requests": float(np.median([len(one.log) for one in splits])),
        "conversations": float(np.median([len(one.judged) for one in splits])),
        "clusters": float(np.median([len({cluster for cluster, _ in one.judged.values()}) for one in splits])),
    }


def shares_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return domain to its share of the samples."""
    return {name: count / len(samples) for name, count in Counter(one.domain for one in samples).items()}


def estimate(
    judged: Mapping[str, tuple[str, float]],
    first: Scores,
    later: Scores,
    shares: Mapping[str, float],
    num_draft_tokens: int,
) -> Estimate:
    """Return the gain with its 95% interval, as the gate tells it of one window.

    Args:
        judged: id to cluster and weight of what is judged by.
        first: id to the first draft's score.
        later: id to that of the draft that is held against it.
        shares: domain to its share of the traffic.
        num_draft_tokens: K.
    """
    kept = {id: {"cluster": cluster, "weight": weight} for id, (cluster, weight) in judged.items() if id in first}
    before, after = ([of[id].model_copy(update=said) for id, said in kept.items()] for of in (first, later))
    last = Evidence.start(num_draft_tokens).after(before, after, shares).last
    assert last is not None
    return last


def mean_gain(samples: Sequence[Sample], first: Scores, later: Scores, shares: Mapping[str, float]) -> Mean:
    """Return the mean gain of samples, with its standard error over their groups.

    Args:
        samples: those without a score are left out; a cluster is a group, "" is one of its own.
        first: id to the first draft's score.
        later: id to that of the draft that is held against it.
        shares: domain to its share; one without a sample counts as one without gain.
    """
    value, variance = 0.0, 0.0
    for domain, share in shares.items():
        kept = [one for one in samples if one.domain == domain and one.id in first]
        if not kept:
            continue
        gains = [
            later[one.id].accepted / later[one.id].steps - first[one.id].accepted / first[one.id].steps for one in kept
        ]
        mean, sums = float(np.mean(gains)), defaultdict[str, float](float)
        for sample, one in zip(kept, gains, strict=True):
            sums[sample.cluster or sample.id] += one - mean
        value += share * mean
        variance += share**2 * sum(one**2 for one in sums.values()) / len(kept) ** 2
    return Mean(value, math.sqrt(variance))


def summary(held: Sequence[tuple[Estimate, float]]) -> dict[str, float]:
    """Return how many of the intervals hold their truth, and how they lie."""
    values = np.array([one.value for one, _ in held])
    return {
        "covered": sum(one.low <= truth <= one.high for one, truth in held),
        "too_high": sum(one.low > truth for one, truth in held),
        "too_low": sum(one.high < truth for one, truth in held),
        "mean": float(values.mean()),
        "truth": float(np.mean([truth for _, truth in held])),
        "spread": float(values.std(ddof=1)) if len(held) > 1 else 0.0,
        "half_width": float(np.median([(one.high - one.low) / 2 for one, _ in held])),
    }
