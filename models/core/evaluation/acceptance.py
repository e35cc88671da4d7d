"""How much of a draft is accepted: the one definition that serving, gate, benchmarks and dashboard share.

Over a set of requests both figures are ratios of sums (every step counts once, so a long answer weighs more than a
short one), because that is what sets the tokens a second. Intervals resample requests, not steps: the steps of one
answer are alike. Compare only figures of equal K and equal sampling settings; nothing here can check that.

A verification step counts if something was to draft for it: the draft, 0 tokens included, or look-up, also one that
found nothing. A step for which neither was run says nothing of either, and does not count: speculation was off, the
sequence had come to the end of the draft's context, or the draft rested. Tokens that a stop cuts off are not accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from models.types import Estimate, Frozen

CONFIDENCE = 0.95
MAX_LOOP_PERIOD = 64
MIN_LOOP_REPEATS = 4
MIN_LOOP_TOKENS = 32
UNDRAFTED = -1  # the match of a step for which neither the draft nor look-up was run

Floats = NDArray[np.float64]


class Trace(Frozen):
    """What speculation did for one request, whose id is unique in a list of traces, and means one prompt in two.

    Tokens are drafted and accepted in each verification step that counts, prefill excluded; those that a stop cuts off
    are not accepted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    domain: str

    @model_validator(mode="after")
    def _counts_fit(self) -> "Trace":
        if len(self.drafted) != len(self.accepted):
            raise ValueError(f"drafted has {len(self.drafted)} steps, accepted {len(self.accepted)}")
        if any(not 0 <= a <= d for a, d in zip(self.accepted, self.drafted, strict=True)):
            raise ValueError("accepted must be from 0 to drafted in each step")
        return self


class AcceptanceCount(NamedTuple):
    """What speculation did for one request, in sums; `number` grows with the time at which requests ended."""

    number: int
    domain: str
    steps: int
    drafted: int
    accepted: int


class Summary(Frozen):
    """Acceptance over a set of requests; None where nothing was drafted or no step was taken.

    Figures without loops are without the requests whose output repeats itself, which flatters. Of each drafted place
    `per_position` is the share of steps that accepted it in those that drafted it.
    """

    num_sequences: int
    num_looping: int
    rate: Estimate | None
    tau: Estimate | None
    rate_without_loops: Estimate | None
    tau_without_loops: Estimate | None
    per_position: tuple[Estimate, ...]


def counted(
    drafted: Sequence[int], accepted: Sequence[int], matches: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return drafted and accepted tokens of the steps that count: of matches, where there are any, not `UNDRAFTED`."""
    kept = [place for place in range(len(drafted)) if not matches or matches[place] != UNDRAFTED]
    return tuple(drafted[place] for place in kept), tuple(accepted[place] for place in kept)


def mean_accepted_length(traces: Sequence[Trace]) -> float:
    """Return τ = 1 + accepted tokens / verification steps; ValueError if there was no verification step."""
    _, accepted, steps = _counts(traces).sum(axis=0)
    if not steps:
        raise ValueError(f"{len(traces)} traces have no verification step, so they have no accepted length")
    return float(1 + accepted / steps)


def summarise(traces: Sequence[Trace], seed: int = 0, num_resamples: int = 2000) -> Summary:
    """Summarise with 95% intervals from resampled requests; ValueError for no traces, or a request id twice."""
    _check_ids(traces)
    counts, looping = _counts(traces), np.array([is_looping(trace.token_ids) for trace in traces])
    rate, tau = _rate_and_tau(counts, seed, num_resamples)
    rate_without_loops, tau_without_loops = _rate_and_tau(counts[~looping], seed, num_resamples)
    # [N, 2P]: in how many steps each of the P places was accepted, then drafted.
    num_positions = max((max(trace.drafted, default=0) for trace in traces), default=0)
    both = [np.array([trace.accepted, trace.drafted])[:, None] for trace in traces]
    places = np.arange(num_positions)[:, None]
    positions = np.array([(one > places).sum(axis=-1).ravel() for one in both], dtype=np.float64)
    sums = np.vstack([positions.sum(axis=0), resample_sums(positions, np.random.default_rng(seed), num_resamples)])
    return Summary(
        num_sequences=len(traces),
        num_looping=int(looping.sum()),
        rate=rate,
        tau=tau,
        rate_without_loops=rate_without_loops,
        tau_without_loops=tau_without_loops,
        per_position=tuple(estimate(_ratio(sums[:, i], sums[:, num_positions + i])) for i in range(num_positions)),
    )


def difference(before: Sequence[Trace], after: Sequence[Trace], num_resamples: int = 2000) -> Estimate:
    """Return τ of `after` minus τ of `before`, with a 95% interval.

    Lists with the same request ids are paired: each resample draws the same requests from both, which removes the
    difference between requests from the interval. Other lists are resampled apart. ValueError if a list is empty, has
    no verification step or has a request id twice.
    """
    value = mean_accepted_length(after) - mean_accepted_length(before)
    _check_ids(before)
    _check_ids(after)
    rng = np.random.default_rng(0)
    counts_after = {trace.request_id: row for trace, row in zip(after, _counts(after), strict=True)}
    if counts_after.keys() == {trace.request_id for trace in before}:
        paired = np.array([counts_after[trace.request_id] for trace in before])
        sums = resample_sums(np.hstack([_counts(before), paired]), rng, num_resamples)
    else:
        sums = np.hstack([resample_sums(_counts(traces), rng, num_resamples) for traces in (before, after)])
    gains = _ratio(sums[:, 4], sums[:, 5]) - _ratio(sums[:, 1], sums[:, 2])
    return estimate(np.array([value, *gains]))


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the output repeats itself: 4 or more turns of a period of at most 64 tokens, 32 tokens or more in all."""
    tokens = np.asarray(token_ids)
    for period in range(1, min(MAX_LOOP_PERIOD, len(tokens) // MIN_LOOP_REPEATS) + 1):
        # A stretch of n tokens has this period when n − period tokens in a row equal the one a period before.
        needed = max(MIN_LOOP_REPEATS * period, MIN_LOOP_TOKENS) - period
        equal = np.concatenate([[0], np.cumsum(tokens[period:] == tokens[:-period])])
        if len(equal) > needed and (equal[needed:] - equal[:-needed]).max() == needed:
            return True
    return False


def resample_sums(rows: Floats, rng: np.random.Generator, num_resamples: int) -> Floats:
    """Return [R, C], the column sums of R resamples of N rows [N, C], drawn with replacement."""
    num_rows = len(rows)
    if num_rows == 0:
        return np.zeros((num_resamples, rows.shape[1]))
    sums = []
    step = max(1, 4_000_000 // num_rows)  # bounds the memory, whatever N is
    for start in range(0, num_resamples, step):
        size = min(step, num_resamples - start)
        drawn = rng.integers(num_rows, size=(size, num_rows)) + num_rows * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * num_rows).reshape(size, num_rows)
        sums.append(times @ rows)
    return np.concatenate(sums)


def _check_ids(traces: Sequence[Trace]) -> None:
    if not traces:
        raise ValueError("wanted traces, got none")
    if len({trace.request_id for trace in traces}) < len(traces):
        raise ValueError("a request_id occurs twice in one list of traces")


def rejected_places(drafted: Sequence[int], accepted: Sequence[int], matches: Sequence[int], length: int) -> list[int]:
    """Return the places of a completion at which a token of the draft was rejected, 0 being its first token.

    Of steps see `Trace`; a match is not 0 where the draft did not draft, and without matches it always did.
    """
    place, found = 1, []
    for of_step, kept, match in zip(drafted, accepted, matches or [0] * len(drafted), strict=True):
        place += kept
        if kept < of_step and match == 0 and place < length:  # behind the end a token was drafted and never judged
            found.append(place)
        place += 1
    return found


def _counts(traces: Sequence[Trace]) -> Floats:
    """Return [N, 3]: drafted, accepted, steps."""
    counts = [(sum(trace.drafted), sum(trace.accepted), len(trace.drafted)) for trace in traces]
    return np.array(counts, dtype=np.float64).reshape(-1, 3)


def _rate_and_tau(counts: Floats, seed: int, num_resamples: int) -> tuple[Estimate | None, Estimate | None]:
    resamples = resample_sums(counts, np.random.default_rng(seed), num_resamples)
    drafted, accepted, steps = np.vstack([counts.sum(axis=0), resamples]).T
    rate = estimate(_ratio(accepted, drafted)) if drafted[0] else None
    return rate, estimate(1 + _ratio(accepted, steps)) if steps[0] else None


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def estimate(values: Floats) -> Estimate:
    """Make an estimate of [1 + R] values: the figure, then its resamples, NaN where one tells nothing."""
    low, high = np.nanquantile(values[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value=float(values[0]), low=float(low), high=float(high))
