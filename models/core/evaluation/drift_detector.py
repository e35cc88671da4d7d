"""Whether served acceptance has fallen so far that a refresh should start, and how many rows that refresh wants.

A domain is held against what its draft was promoted for: its own τ at the gate. A domain that the draft has never seen
can't fall; `is_low` says whether it wants a refresh. Of a request with s steps and a accepted tokens, evidence of a
fall is

    S ← min(h, max(0, S + (g₀ − g₁) / σ² × (s (g₀ + g₁) / 2 − a) / s̄))

where g₀ and g₁ are the gain per step if a share `recover` or `fall` of the promised one is lost, s̄ the mean number of
steps and σ² the variance of a / s̄ about the domain's own gain. That is CUSUM: the log of how much better a fall
explains the last requests, wherever it may have begun. Told at h = log n, it lets n requests pass between two false
alarms on the average, where requests are independent and their errors normal. What was good before is forgotten, so
that a fall is told as soon after a year as after a day.

Only requests that a draft drafted alone say how it does, and these are few (services/drift.py): the first
ones of each draft and domain, then a fixed share, and four times that while there is doubt, until a fall is told. All
their steps draft K tokens, whatever is planned for others, so that a / s is the sum over places 1 to K of how often all
tokens up to there were accepted: what the gate promised, at its K. Positions are not tested one by one, since what a
draft is worth is their sum (`tests.benchmarks.falls` plants both); nor are logged rows scored, since counts need no
consent and no processor.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from statistics import median
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from models.core.evaluation.acceptance import AcceptanceCount, Floats
from models.core.evaluation.betting import BETS, log_growth, log_wealth
from models.types import Frozen

PAPER = "Page 1954, Continuous inspection schemes; Lorden 1971 for the time between false alarms"

# Standard deviation of a conversation's gain in accepted tokens per step; of the demo's drafts, 100 conversations gave
# the gain to ± 0.047.
SPREAD = 0.25
POWER = 0.842  # standard normal quantile: the gain is to be shown in 80% of refreshes
MOST_ROWS = 1 << 24
# A refresh seldom brings back all that was lost.
SHARE_BACK = 0.5
LEAST_GAIN = 0.05

LOW = 0.5
LATELY = 64  # requests that figures go back over
# What is known of the spread before anything is seen: as a share of the promised gain, and the requests that it counts
# as. The demo's chat has 0.74, its code 0.42.
FIRST_SPREAD, FIRST_WEIGHT = 0.75, 8
DOUBT = 1 / 3  # of the evidence that tells a fall; from there until it is told a domain is looked at more closely
FIRST, SHARE, DOUBTED = 4, 1 / 32, 1 / 8


class Params(Frozen):
    """Thresholds.

    Attributes:
        fall: share of the promised gain over 1.0 whose loss counts as a fall.
        recover: share whose loss still counts as recovered.
        between_alarms: requests between two false alarms of a domain, on the average, where `recover` is lost; where
            less is lost there are more.
        min_requests: a domain's requests that are needed to say anything; only those count that the draft drafted
            alone, see services/drift.py.
        period_s: seconds between looks.
    """

    fall: float = Field(0.3, gt=0, lt=1)
    recover: float = Field(0.1, ge=0, lt=1)
    between_alarms: int = Field(3000, ge=2)
    min_requests: int = Field(16, ge=1)
    period_s: float = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.recover >= self.fall:
            raise ValueError(f"recover must be below fall, got {self.recover:g} and {self.fall:g}")
        return self


class Standing(NamedTuple):
    """What can be said of a domain: τ that its draft promised, τ that is served, and whether that has fallen."""

    promised: float
    served: float
    fallen: bool


class Doubt(NamedTuple):
    """Evidence S of a fall, and sums over about the last `LATELY` requests: [] of one domain, or [R] of many.

    Squares are of the distances from the domain's own gain, each in mean steps.
    """

    evidence: Floats
    requests: Floats
    steps: Floats
    accepted: Floats
    squares: Floats


NO_DOUBT = Doubt(*np.zeros(5))


def share_alone(number: Floats, doubted: NDArray[np.bool_]) -> Floats:
    """Return the chance with which a draft drafts the n-th request of a domain alone, n from 1.

    Of the first n requests about FIRST × (1 + ln(n / FIRST)) are, until that is down to the share.
    """
    return np.asarray(np.clip(FIRST / number, np.where(doubted, DOUBTED, SHARE), 1.0))


def doubt(before: Doubt, steps: Floats, accepted: Floats, gain: Floats, params: Params) -> Doubt:
    """Return what is known after one more request, tested by the spread before it; gain is τ − 1, above 0."""
    mean_steps = np.where(before.requests > 0, before.steps / np.maximum(before.requests, 1), steps)
    own = np.where(before.requests > 0, before.accepted / np.maximum(before.steps, 1), gain)
    variance = (before.squares + FIRST_WEIGHT * (FIRST_SPREAD * gain) ** 2) / (before.requests + FIRST_WEIGHT)
    between, apart = gain * (1 - (params.recover + params.fall) / 2), gain * (params.fall - params.recover)
    evidence = before.evidence + apart / variance * (between * steps - accepted) / mean_steps
    kept = np.where(before.requests >= LATELY, 1 - 1 / LATELY, 1.0)
    return Doubt(
        evidence=np.clip(evidence, 0.0, _told(params)),
        requests=kept * before.requests + 1,
        steps=kept * before.steps + steps,
        accepted=kept * before.accepted + accepted,
        squares=kept * before.squares + ((accepted - own * steps) / mean_steps) ** 2,
    )


def has_fallen(found: Doubt, params: Params) -> NDArray[np.bool_]:
    """Return whether a fall is told."""
    return np.asarray((found.evidence >= _told(params)) & (found.requests >= params.min_requests))


def is_doubted(found: Doubt, params: Params) -> NDArray[np.bool_]:
    """Return whether more requests should be tested: there may have been a fall, and it is not told yet."""
    return np.asarray((found.evidence >= DOUBT * _told(params)) & ~has_fallen(found, params))


def _told(params: Params) -> float:
    return math.log(params.between_alarms)


class DriftDetector:
    """Tests the domains that one draft serves, request by request."""

    def __init__(self, promised: Mapping[str, float], params: Params) -> None:
        self._promised, self._params = promised, params
        self._doubts: dict[str, Doubt] = {}

    def take(self, tallies: Iterable[AcceptanceCount]) -> None:
        """Hear of requests that the draft drafted alone, the oldest first."""
        for one in tallies:
            if (gain := self._promised.get(one.domain, 1.0) - 1) > 0:
                before, (steps, accepted) = self._doubts.get(one.domain, NO_DOUBT), np.array([one.steps, one.accepted])
                self._doubts[one.domain] = doubt(before, steps, accepted, np.array(gain), self._params)

    def standings(self) -> dict[str, Standing]:
        """Return the domains that have fallen or are where they should be; of others nothing can be said."""
        params, seen = self._params, {}
        for domain, found in self._doubts.items():
            promised, served = self._promised[domain], float(1 + found.accepted / found.steps)
            fallen = bool(has_fallen(found, params))
            little = found.evidence <= _told(params) / 2 and found.requests >= params.min_requests
            if fallen or (little and 1 - (served - 1) / (promised - 1) <= params.recover):
                seen[domain] = Standing(promised, served, fallen)
        return seen

    def doubted(self) -> frozenset[str]:
        """Return the domains of which more requests should be tested; see `is_doubted`."""
        return frozenset(domain for domain, found in self._doubts.items() if is_doubted(found, self._params))


def usual_tau(domain: str, promised: Mapping[str, float]) -> float | None:
    """Return the median τ that a draft promises the domains but one; None where it promises nothing of them."""
    return median(others) if (others := [tau for name, tau in promised.items() if name != domain]) else None


def is_low(domain: str, promised: Mapping[str, float]) -> bool:
    """Return whether a domain never had acceptance to lose: little or nothing was promised of it.

    Little is less than the share `LOW` of the gain that is usual. The gate measures a domain's τ on what was held out,
    whether the draft has learnt the domain or not.
    """
    usual = usual_tau(domain, promised)
    return domain not in promised or (usual is not None and promised[domain] - 1 < LOW * (usual - 1))


def enough_rows(
    lost: float,
    num_rows: int,
    held_out_fraction: float,
    num_draft_tokens: int,
    alpha: float,
    known: Floats | float = 0.0,
) -> int:
    """Return how many of the waiting conversations must be of a fallen domain for the gate to show a gain there.

    The gate sees all of the traffic, of which the domain is a share s = d / n, and d rows bring back g tokens per step
    there and nothing elsewhere. It bets (models/core/evaluation/betting.py) on f n differences, of which a share s has
    the mean g and the others 0: the answer is the smallest d with which that wealth reaches 1 / alpha; it is above n,
    and then of conversations of this domain alone, where not even all n of them would do. Conversations are taken as
    independent: of those that are said to belong together, count one.

    Args:
        lost: promised minus served τ.
        num_rows: n, conversations of all domains that wait.
        held_out_fraction: f, the share that the gate gets.
        num_draft_tokens: K.
        alpha: error that the gate allows the challenger.
        known: [B], by how much the log of each bet on it has grown before.
    """
    gain = max(SHARE_BACK * lost, LEAST_GAIN)
    without, within = (_growth(mean, num_draft_tokens) for mean in (0.0, gain))

    def reaches(of_domain: int) -> bool:
        total = max(of_domain, num_rows)
        share, tested = of_domain / total, total * held_out_fraction
        spread = math.sqrt(SPREAD**2 + share * (1 - share) * gain**2)
        # By its slope at 0 the log of a bet's wealth varies by so much, a little more than it does.
        unlucky = POWER * math.sqrt(tested) * spread * BETS / num_draft_tokens
        growth = tested * (share * within + (1 - share) * without) - unlucky
        return float(log_wealth(known + growth)) >= -math.log(alpha)

    return 1 + bisect_left(range(1, MOST_ROWS), True, key=reaches)


@lru_cache(maxsize=64)
def _growth(mean: float, bound: int) -> Floats:
    """Return [B]: what one difference, normal around `mean`, is expected to add to the log of each bet's wealth."""
    places, weights = np.polynomial.hermite_e.hermegauss(20)
    differences = np.clip(mean + SPREAD * places, -bound, bound)
    return log_growth(differences, weights / weights.sum(), 0.0, bound)
