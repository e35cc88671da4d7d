"""How often acceptance is told to have fallen where it has not, and how soon where it has, by simulation.

Requests of one domain are drawn whose truth is known, and those that are drafted alone are judged as the service judges
them (models/evaluation/watch.py); a domain counts as judged after each of them. A fall keeps the steps and takes
accepted tokens.

What conversations give, and how far they differ, is the demonstration's: of its gate's scores, steps weighted, `chat`
(94 conversations) has a gain of 0.74 with a spread of 0.55 from one to the other, `code` (50) 0.68 with 0.29.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.views.figures import draw_shares
from infra.views.results import Grid, Report
from models.evaluation.watch import LATELY, Doubt, Params, doubt, has_fallen, is_doubted, share_alone
from tasks.measure.run import Run

NUM_PLACES = 3  # K
WEEK = 7 * 24 * 3600  # requests of a domain, one a second
FALLS_AT, MOST = 4000, 100_000
RHO = 0.3
FEW, SOME = 0.01, 0.05  # of the weeks without a fall
WITHIN, MEDIAN, OFTEN = 6000, 3000, 0.9
# The rule before this one: the last requests, from so many on.
FORMER_LEAST = 16

Floats = NDArray[np.float64]


class Traffic(NamedTuple):
    """Conversations whose gain in accepted tokens a step is mean × (1 + spread × z)² / (1 + spread²), z normal.

    Attributes:
        error: of a promise that comes from 100 conversations, as a share of the gain.
    """

    mean: float
    spread: float
    error: float


class Case(NamedTuple):
    """What is planted.

    Attributes:
        lost: share of the gain that is lost; 0 for a week without a fall.
        begins: request from which on it is lost.
        lost_over: requests over which it is lost, little by little.
        cluster_size: requests in a row that share `RHO` of their variance.
        promised: the promise comes from 100 conversations, not from all there are.
        sways: the gain goes up and down by this share, as the mix of prompts does, once in 5,000 requests.
        behind: drafted places in front of which nothing is lost; what is lost, the later ones lose alone.
        limit: share of the weeks in which a fall may be told.
    """

    lost: float = 0.0
    begins: int = FALLS_AT
    lost_over: int = 1
    cluster_size: int = 1
    promised: bool = False
    sways: float = 0.0
    behind: int = 0
    limit: float = FEW


TRAFFIC = {"chat": Traffic(0.93, 0.40, 0.075), "code": Traffic(0.72, 0.22, 0.043)}
CASES = {
    "a week without a change": Case(),
    "a week, in clusters of 30": Case(cluster_size=30, limit=SOME),
    "a week, the mix sways by 10%": Case(sways=0.1, limit=SOME),
    "a week, promised from 100 conversations": Case(promised=True, limit=SOME),
    "10% lost": Case(lost=0.1),
    "20% lost": Case(lost=0.2),
    "30% lost": Case(lost=0.3),
    "30% lost, in clusters of 30": Case(lost=0.3, cluster_size=30),
    "30% lost over 10,000 requests": Case(lost=0.3, lost_over=10_000),
    "60% lost": Case(lost=0.6),
    "90% lost": Case(lost=0.9),
    "90% lost from the first request, as in a new domain": Case(lost=0.9, begins=0),
    "30% lost, all of it behind the first place": Case(lost=0.3, behind=1),
}


class Told(NamedTuple):
    """[R] each: requests after which a fall is told, infinite where it never is.

    Attributes:
        after: by the rule that is served.
        former: by the one before it: over the last requests, more than `fall` is lost.
    """

    after: Floats
    former: Floats


def measure(run: Run, num_runs: int) -> Report:
    """Simulate each case for each kind of traffic, see `simulate`, and draw falls.png."""
    params = run.recipe.serve.watch
    found: dict[str, dict[str, Told]] = {}
    with run.bar("served acceptance", len(CASES)) as bar:
        for number, (name, case) in enumerate(CASES.items()):
            found[name] = {}
            for place, (domain, traffic) in enumerate(TRAFFIC.items()):
                rng = np.random.default_rng([run.recipe.seed, number, place])
                label = f"falls-{domain}-{name}".replace(" ", "-").replace(",", "").replace("%", "")
                kept = run.cells.keep(label, lambda: _cell(simulate(traffic, case, params, num_runs, rng)))  # noqa: B023
                found[name][domain] = Told(*(np.array([math.inf if one is None else one for one in of]) for of in kept))
            bar.advance()
    lines = {
        f"{domain}, {name}": np.minimum(told[domain].after, MOST).tolist()
        for name, told in found.items()
        if CASES[name] == Case(CASES[name].lost) and CASES[name].lost >= 0.2
        for domain in TRAFFIC
    }
    draw_shares(lines, "requests of the domain until the fall is told", run.folder / "falls.png")
    return make_report(found, params)


def simulate(traffic: Traffic, case: Case, params: Params, num_runs: int, rng: np.random.Generator) -> Told:
    """Return when a fall is told, in requests since it began, or of the week.

    Args:
        traffic: what conversations give.
        case: what is planted.
        params: what counts as a fall.
        num_runs: R.
        rng: of the requests.
    """
    sample = _requests(traffic, rng.standard_normal(200_000), rng)
    gain = np.full(num_runs, sample[1].sum() / sample[0].sum())
    of_sample = _share_behind(sample[1] / sample[0], case.behind)
    lost_there = case.lost * sample[1].sum() / (sample[1] * of_sample).sum()
    promised = gain * (1 + traffic.error * rng.standard_normal(num_runs)) if case.promised else gain
    begins, ends = (case.begins, case.begins + MOST) if case.lost else (0, WEEK)
    after, former = np.full((2, num_runs), np.inf)
    seen, asked = Doubt(*np.zeros((5, num_runs))), np.zeros(num_runs)
    last, cluster, shared = np.zeros((LATELY, 2, num_runs)), np.full(num_runs, -1.0), np.zeros(num_runs)
    phase, count = rng.random(num_runs), 0
    while (asked < ends).any() and not (np.isfinite(after).all() and np.isfinite(former).all()):
        asked += rng.geometric(share_alone(asked + 1, is_doubted(seen, params)))
        anew, cluster = asked // case.cluster_size != cluster, asked // case.cluster_size
        shared = np.where(anew, rng.standard_normal(num_runs), shared)
        own = rng.standard_normal(num_runs)
        z = math.sqrt(RHO) * shared + math.sqrt(1 - RHO) * own if case.cluster_size > 1 else own
        steps, accepted = _requests(traffic, z, rng)
        lost = (
            lost_there
            * _share_behind(accepted / steps, case.behind)
            * np.clip((asked - begins + 1) / case.lost_over, 0, 1)
        )
        accepted = accepted * (1 - lost + case.sways * np.sin(2 * np.pi * (asked / 5000 + phase)))
        seen = doubt(seen, steps, accepted, promised, params)
        last[count % LATELY] = steps, accepted
        count += 1
        sums = last.sum(axis=0)
        for when, is_told in (
            (after, has_fallen(seen, params)),
            (former, (1 - sums[1] / sums[0] / promised > params.fall) & (count >= FORMER_LEAST)),
        ):
            late = is_told & np.isinf(when) & (asked >= begins) & (asked < ends)
            when[late] = asked[late] - begins
    return Told(after, former)


def _requests(traffic: Traffic, z: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return steps and accepted tokens of answers of 20 to 40 tokens, for standard normal [N] z."""
    gain = np.clip(traffic.mean * (1 + traffic.spread * z) ** 2 / (1 + traffic.spread**2), 0, NUM_PLACES)
    steps = np.maximum(1.0, np.round(rng.integers(20, 41, z.shape) / (1 + gain)))
    return steps, gain * steps


def _share_behind(gain: Floats, place: int) -> Floats:
    """Return the share of [N] gains that drafted places after the first so many have, where all do as well.

    The n-th place is accepted with the n-th power of a chance, of which the gain is the sum over the places.
    """
    if place == 0:
        return np.ones_like(gain)
    chances, powers = np.linspace(0, 1, 1001), np.arange(1, NUM_PLACES + 1)[:, None]
    chance = np.interp(gain, (chances**powers).sum(axis=0), chances)
    behind: Floats = (chance ** powers[place:]).sum(axis=0) / np.maximum((chance**powers).sum(axis=0), 1e-9)
    return behind


def _cell(told: Told) -> list[list[float | None]]:
    return [[float(one) if np.isfinite(one) else None for one in of] for of in told]


def make_report(found: Mapping[str, Mapping[str, Told]], params: Params) -> Report:
    """Hold what was found to the bars."""
    rows, figures, failures = [], dict[str, Any](), []
    for name, of_traffic in found.items():
        case = CASES[name]
        for domain, told in of_traffic.items():
            after, former = (_summary(of) for of in told)
            figures[f"{domain}: {name}"] = {"rule": after, "former": former}
            rows.append([name, domain, *_texts(after), *_texts(former)])
            if not case.lost and after["told"] > case.limit:
                failures.append(f"{domain}, {name}: a fall was told in {after['told']:.1%}, wanted {case.limit:.0%}")
            late = after["median"] is None or after["median"] > MEDIAN or after["soon"] < OFTEN
            if case.lost >= 0.3 and case.lost_over == 1 and late:
                failures.append(f"{domain}, {name}: told in {after['soon']:.1%} within {WITHIN:,} requests")
    columns = ["planted", "traffic", "told", f"within {WITHIN:,}", "median requests"]
    former_columns = ["former rule: told", f"within {WITHIN:,}", "median requests"]
    return Report(
        figures={"watch": params.model_dump(), "falls": figures},
        grids=[Grid("served acceptance told to have fallen", [*columns, *former_columns], rows)],
        notes=[
            f"A week is {WEEK:,} requests of a domain; a fall comes after {FALLS_AT:,} and is looked for in {MOST:,}.",
            f"The former rule: more than {params.fall:.0%} lost over the last {LATELY}, from {FORMER_LEAST} on.",
        ],
        verdict="misses a bar."
        if failures
        else (
            f"meets the bars: a fall told in {FEW:.0%} of weeks without one at most ({SOME:.0%} in clusters, where the "
            f"mix sways or the promise errs), one of 30% after {MEDIAN:,} requests in the median, {WITHIN:,} in "
            f"{OFTEN:.0%}."
        ),
        failures=failures,
    )


def _summary(after: Floats) -> dict[str, Any]:
    told, median = float(np.isfinite(after).mean()), float(np.median(after))
    soon = float((after <= WITHIN).mean())
    return {"told": told, "soon": soon, "median": median if math.isfinite(median) else None}


def _texts(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{one['told']:.1%}", f"{one['soon']:.1%}", "–" if one["median"] is None else f"{one['median']:,.0f}"
