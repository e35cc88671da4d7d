"""Whether a candidate draft may replace its parent: pure statistics, no model.

Parent and candidate were scored on the same target tokens of the same held-out conversations. Two questions:

- Is it better? The lower bound of the gain in τ over all conversations must be above 0. A scheduler asks this of one
  candidate after another, and at a fixed level some would get through by luck; so the k-th test of a line of champions
  is held to alpha_k = alpha_total × 6 / (π² k²), which sums to alpha_total however many tests there are.
- Did a domain pay for it? In each domain the lower bound of (τ candidate − reference) / reference must be at least
  −floor, the reference being the better of the parent here and the best τ that the domain ever had. Against the parent
  alone, ten promotions could lose ten floors.

Conversations are resampled in pairs and within their domain. A bound is estimate − t × the resamples' standard
deviation: 2,000 resamples have no quantile as far out as alpha_k soon lies.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from models.acceptance import Estimate, Floats, resample_sums
from models.params import BaseParams, Frozen


class Score(Frozen):
    """One conversation as one draft would have served it.

    Attributes:
        steps: verification steps.
        accepted: tokens accepted in them: would-be accepted ones (greedy) or the expected number, Σ min(p, q)
            (sampled).
    """

    id: str
    domain: str
    steps: int = Field(ge=1)
    accepted: float = Field(ge=0, allow_inf_nan=False)


class Params(BaseParams):
    """What a candidate is held to."""

    name: Literal["gate"] = "gate"
    floor: float = Field(0.05, ge=0, lt=1, description="share of τ that a domain may lose")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of each one-sided bound")
    num_resamples: int = Field(2000, ge=100, description="bootstrap resamples for each bound")
    min_conversations: int = Field(20, ge=2, description="in each domain")
    alpha_total: float = Field(
        0.05, gt=0, lt=0.5, description="chance that a line of tests promotes a draft without gain"
    )


class DomainVerdict(Frozen):
    """One domain's part of the verdict.

    Attributes:
        num_conversations: how many it was judged on; below the minimum there are no figures.
        gain: τ of the candidate minus τ of the parent.
        relative: (τ of the candidate − best) / best; its `low` is held against −floor.
        best: the reference, max(τ of the parent here, best τ before).
    """

    num_conversations: int
    gain: Estimate | None = None
    relative: Estimate | None = None
    best: float | None = None


class Verdict(Frozen):
    """The decision, and everything that led to it.

    Attributes:
        reasons: why not; empty when promoted.
        overall: τ of the candidate minus τ of the parent over all conversations; bounds at `alpha`.
        alpha: one-sided error that this test was allowed.
    """

    promote: bool
    reasons: tuple[str, ...]
    overall: Estimate
    alpha: float
    domains: dict[str, DomainVerdict]


def allowed_error(test_index: int, alpha_total: float) -> float:
    """Return alpha of the k-th test of a line of champions, k from 1.

    Raises:
        ValueError: `test_index` is below 1.
    """
    if test_index < 1:
        raise ValueError(f"test_index counts from 1, got {test_index}")
    return alpha_total * 6 / (math.pi * test_index) ** 2


def decide(
    parent: Sequence[Score],
    candidate: Sequence[Score],
    best: Mapping[str, float],
    params: Params,
    test_index: int,
    seed: int,
) -> Verdict:
    """Decide whether the candidate is promoted.

    Args:
        parent: the serving draft's scores.
        candidate: the candidate's, of the same conversations in any order.
        best: domain to the best τ that a champion ever had there. A domain of `best` without conversations here is
            not judged.
        params: what the candidate is held to.
        test_index: how many candidates of this line of champions were tested, this one included.
        seed: of the resampling.

    Raises:
        ValueError: no scores, an id twice, ids or domains that differ between the two, a `best` that is no τ, or
            `test_index` below 1.
    """
    rows = _paired_rows(parent, candidate)
    for domain, tau in best.items():
        if not (math.isfinite(tau) and tau >= 1):
            raise ValueError(f'best of domain "{domain}" must be a finite τ from 1 on, got {tau}')
    alpha = min(1 - params.confidence, allowed_error(test_index, params.alpha_total))
    rng = np.random.default_rng(seed)
    sums = {domain: _sums(rows[domain], rng, params.num_resamples) for domain in sorted(rows)}
    parent_tau, candidate_tau = _taus(np.sum(list(sums.values()), axis=0))
    # Each domain's mean is estimated apart, which costs a degree of freedom each; lone conversations show no spread.
    degrees = max(1, len(parent) - len(rows))
    overall = _estimate(candidate_tau - parent_tau, degrees, alpha)
    domains = {domain: _judge(domain, sums, rows, best, params) for domain in sums}
    reasons = [] if overall.low > 0 else [f"no gain shown: τ {overall.value:+.4f}, lower bound {overall.low:+.4f}"]
    reasons += [reason for domain, verdict in domains.items() for reason in refusals(domain, verdict, params)]
    return Verdict(promote=not reasons, reasons=tuple(reasons), overall=overall, alpha=alpha, domains=domains)


def _paired_rows(parent: Sequence[Score], candidate: Sequence[Score]) -> dict[str, Floats]:
    """Return domain → [N, 4]: steps and accepted of the parent, then of the candidate."""
    by_id = {score.id: score for score in candidate}
    if not parent or len(by_id) < len(candidate) or len({score.id for score in parent}) < len(parent):
        raise ValueError("wanted at least one conversation, and each id once in a list")
    if unmatched := sorted({score.id for score in parent} ^ by_id.keys()):
        raise ValueError(
            f"parent and candidate must score the same conversations; unmatched: {', '.join(unmatched[:5])}"
        )
    rows: dict[str, list[tuple[float, ...]]] = {}
    for before in parent:
        after = by_id[before.id]
        if before.domain != after.domain:
            raise ValueError(f'conversation "{before.id}" has domains "{before.domain}" and "{after.domain}"')
        rows.setdefault(before.domain, []).append((before.steps, before.accepted, after.steps, after.accepted))
    return {domain: np.array(values, dtype=np.float64) for domain, values in rows.items()}


def _sums(rows: Floats, rng: np.random.Generator, num_resamples: int) -> Floats:
    """Return [1 + R, 4]: the sums of the rows, then of each resample."""
    return np.vstack([rows.sum(axis=0), resample_sums(rows, rng, num_resamples)])


def _taus(sums: Floats) -> tuple[Floats, Floats]:
    """Return [1 + R] τ of the parent and of the candidate."""
    return 1 + sums[:, 1] / sums[:, 0], 1 + sums[:, 3] / sums[:, 2]


def _judge(
    domain: str, sums: Mapping[str, Floats], rows: Mapping[str, Floats], best: Mapping[str, float], params: Params
) -> DomainVerdict:
    num_conversations = len(rows[domain])
    if num_conversations < params.min_conversations:
        return DomainVerdict(num_conversations=num_conversations)
    parent_tau, candidate_tau = _taus(sums[domain])
    reference = np.maximum(parent_tau, best.get(domain, 1.0))
    degrees, alpha = num_conversations - 1, 1 - params.confidence
    return DomainVerdict(
        num_conversations=num_conversations,
        gain=_estimate(candidate_tau - parent_tau, degrees, alpha),
        relative=_estimate(candidate_tau / reference - 1, degrees, alpha),
        best=float(reference[0]),
    )


def refusals(domain: str, verdict: DomainVerdict, params: Params) -> list[str]:
    """Return why a domain stands against promotion; empty if it does not."""
    if verdict.relative is None:
        wanted = params.min_conversations
        return [f'domain "{domain}" has too few conversations: {verdict.num_conversations}, wanted {wanted}']
    if verdict.relative.low < -params.floor:
        bound = f"lower bound {verdict.relative.low:+.2%} is below the floor of {-params.floor:.2%}"
        return [f'domain "{domain}" may lose: τ {verdict.relative.value:+.2%} of {verdict.best:.3f}, {bound}']
    return []


def _estimate(values: Floats, degrees: int, alpha: float) -> Estimate:
    """Make an estimate of [1 + R] values: the figure, then its resamples; each end is wrong with chance alpha."""
    from scipy.special import stdtrit  # slow to import, and recipes are read by commands that judge nothing

    # Resampling N rows shows a spread smaller by the root of (N − 1) / N, so it is put back.
    spread = float(stdtrit(degrees, 1 - alpha)) * float(values[1:].std(ddof=1)) * math.sqrt((degrees + 1) / degrees)
    value = float(values[0])
    return Estimate(value=value, low=value - spread, high=value + spread)
