"""Figures over the times at which an answer's tokens came, and how two ways of serving compare by them.

With speculation one step brings several tokens, so a client sees arrivals rather than tokens. Inter-token latency is
the time between two arrivals: what stalls, stalls there. The speed counts every token. The first arrival is left out of
both, because it waits for the prompt.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from models.core.evaluation.acceptance import Floats, estimate, resample_sums
from models.types import Estimate, Frozen

NUM_RESAMPLES = 2000

# (start, end) on one clock, in seconds.
Span = tuple[float, float]


class Spread(Frozen):
    """The middle of a set of figures, and its tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float


class Ratio(Frozen):
    """One side's speed over another's: prompt by prompt, and over all tokens and seconds, with a 95% interval."""

    prompts: Spread
    overall: Estimate


class Decoded(NamedTuple):
    """What one answer's decoding took: tokens after the first, and the seconds from the first token to the last."""

    num_tokens: int
    seconds: float


def spread(values: Sequence[float]) -> Spread:
    """Summarise figures; ValueError if there are none."""
    p10, median, p90 = (percentile(values, percent) for percent in (10, 50, 90))
    return Spread(median=median, p10=p10, p90=p90)


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Return a percentile, linear between two values; ValueError if there are none."""
    if not len(values):
        raise ValueError(f"got no values, wanted some to take percentile {percent:g} of")
    return float(np.percentile(values, percent))


def decoded(arrival_ms: Sequence[float]) -> Decoded | None:
    """Return what the tokens after the first took, by when each came; None if there was none after it."""
    if len(arrival_ms) < 2 or arrival_ms[-1] <= arrival_ms[0]:
        return None
    return Decoded(len(arrival_ms) - 1, (arrival_ms[-1] - arrival_ms[0]) / 1000)


def inter_token_spans(sent_s: float, arrival_ms: Sequence[float]) -> list[Span]:
    """Return the time between each two arrivals, on the clock that `sent_s` is on; equal times are one arrival."""
    return list(pairwise(sent_s + ms / 1000 for ms in sorted(set(arrival_ms))))


def touching(spans: Sequence[Span], window: Span) -> list[float]:
    """Return the milliseconds of the spans that lie in a window or reach into it."""
    first, last = window
    return [1000 * (end - start) for start, end in spans if end >= first and start <= last]


def longest_silence(moments_s: Sequence[float], window: Span) -> Span:
    """Return the longest stretch of a window in which nothing came; the window's ends count as something."""
    first, last = window
    inside = [first, *sorted(moment for moment in moments_s if first < moment < last), last]
    return max(pairwise(inside), key=lambda span: span[1] - span[0])


def compare_speed(of: Mapping[str, Decoded], to: Mapping[str, Decoded], seed: int = 0) -> Ratio | None:
    """Compare tokens a second, paired by prompt; above 1 `of` is the faster side. None if no prompt is in both."""
    shared = sorted(of.keys() & to.keys())
    if not shared:
        return None
    rows, rng = np.array([(*of[prompt], *to[prompt]) for prompt in shared]), np.random.default_rng(seed)
    return Ratio(
        prompts=spread(_speed_ratio(rows).tolist()),
        overall=estimate(_speed_ratio(np.vstack([rows.sum(axis=0), resample_sums(rows, rng, NUM_RESAMPLES)]))),
    )


def compare_blocks(pairs: Sequence[tuple[Mapping[str, Decoded], Mapping[str, Decoded]]], seed: int = 0) -> Estimate:
    """Compare tokens a second of two ways that took turns; above 1 the first is the faster one.

    What slows a machine for a while slows whole blocks, so pairs of blocks are resampled, and within them requests.
    ValueError if there is no pair, or one without a request that is in both.
    """
    blocks = [
        np.array([(*of[request], *to[request]) for request in sorted(of.keys() & to.keys())], dtype=np.float64)
        for of, to in pairs
    ]
    if not blocks or not all(map(len, blocks)):
        raise ValueError(
            f"got {len(blocks)} pairs of blocks with {sum(map(len, blocks))} requests, wanted some in each"
        )
    rng = np.random.default_rng(seed)
    sums = np.zeros((NUM_RESAMPLES, 4))
    for _ in blocks:  # one draw of a pair each
        drawn = rng.integers(len(blocks), size=NUM_RESAMPLES)
        for number, block in enumerate(blocks):
            chosen = np.flatnonzero(drawn == number)
            sums[chosen] += resample_sums(block, rng, len(chosen))
    return estimate(_speed_ratio(np.vstack([np.concatenate(blocks).sum(axis=0), sums])))


def compare_percentiles(
    of: Sequence[Sequence[float]], to: Sequence[Sequence[float]], percent: float, seed: int = 0
) -> Estimate:
    """Return a percentile of one pool of figures over the other's, with a 95% interval; 99 percent is the p99.

    A window or a request is a group, because its figures are alike, and groups are resampled. ValueError if a side has
    no figures.
    """
    first, second = ([np.asarray(group, dtype=np.float64) for group in groups if len(group)] for groups in (of, to))
    if not (first and second):
        raise ValueError("got a side without any figures, wanted some on both")
    rng = np.random.default_rng(seed)

    def resampled(groups: list[Floats]) -> float:
        drawn = rng.integers(len(groups), size=len(groups))
        return percentile(np.concatenate([groups[index] for index in drawn]), percent)

    whole = percentile(np.concatenate(first), percent) / percentile(np.concatenate(second), percent)
    ratios = [resampled(first) / resampled(second) for _ in range(NUM_RESAMPLES)]
    return estimate(np.array([whole, *ratios]))


def _speed_ratio(rows: Floats) -> Floats:
    """[..., 4] tokens and seconds of two sides → [...]"""
    return np.asarray((rows[..., 0] / rows[..., 1]) / (rows[..., 2] / rows[..., 3]))
