"""How often acceptance is told to have fallen where it has not, and how soon where it has, by simulation.

    python -m tests.benchmarks.falls --runs 200

Requests of one domain are drawn whose truth is known, and those that are drafted alone are judged as the service judges
them (models/core/evaluation/drift_detector.py); a domain counts as decided after each of them. A fall keeps the steps
and takes accepted tokens.

What conversations give, and how far they differ, is the demonstration's: of its gate's scores, steps weighted, `chat`
(94 conversations) has a gain of 0.74 with a spread of 0.55 from one to the other, `code` (50) 0.68 with 0.29.
"""

import argparse
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.core.evaluation.drift_detector import Doubt, Params, doubt, has_fallen, is_doubted, share_alone
from models.recipe import DEFAULT_RECIPE, load_recipe
from tests.benchmarks.scripts import cells, show, summary

NUM_PLACES = 3  # K
WEEK = 7 * 24 * 3600  # requests of a domain, one a second
FALLS_AT, MOST = 4000, 100_000
RHO = 0.3
WITHIN = 6000

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
    """

    lost: float = 0.0
    begins: int = FALLS_AT
    lost_over: int = 1
    cluster_size: int = 1
    promised: bool = False
    sways: float = 0.0
    behind: int = 0


TRAFFIC = {"chat": Traffic(0.93, 0.40, 0.075), "code": Traffic(0.72, 0.22, 0.043)}
CASES = {
    "a week without a change": Case(),
    "a week, in clusters of 30": Case(cluster_size=30),
    "a week, the mix sways by 10%": Case(sways=0.1),
    "a week, promised from 100 conversations": Case(promised=True),
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


def simulate(traffic: Traffic, case: Case, params: Params, num_runs: int, rng: np.random.Generator) -> Floats:
    """Return [R] requests after which a fall is told, since it began or of the week; infinite where it never is.

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
    after = np.full(num_runs, np.inf)
    seen, asked = Doubt(*np.zeros((5, num_runs))), np.zeros(num_runs)
    cluster, shared, phase = np.full(num_runs, -1.0), np.zeros(num_runs), rng.random(num_runs)
    while (asked < ends).any() and not np.isfinite(after).all():
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
        late = has_fallen(seen, params) & np.isinf(after) & (asked >= begins) & (asked < ends)
        after[late] = asked[late] - begins
    return after


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


def main() -> None:
    """Simulate each case for each kind of traffic."""
    parser = argparse.ArgumentParser(description="Simulate how soon fallen acceptance is told.")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    parser.add_argument("--runs", type=int, default=500, help="weeks or falls of each kind")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe)
    params, rows, found = recipe.serve.drift_detector, [], dict[str, Any]()
    for number, (name, case) in enumerate(tqdm(CASES.items())):
        for place, (domain, traffic) in enumerate(TRAFFIC.items()):
            rng = np.random.default_rng([recipe.seed, number, place])
            after = simulate(traffic, case, params, given.runs, rng)
            found[f"{domain}: {name}"] = summary(after, WITHIN)
            rows.append([name, domain, *cells(found[f"{domain}: {name}"])])
    columns = ["planted", "traffic", "told", f"within {WITHIN:,}", "median requests"]
    figures = {"recipe": recipe.name, "runs": given.runs, "drift_detector": params.model_dump(), "falls": found}
    show(figures, f"falls after {FALLS_AT:,} requests", columns, rows)


if __name__ == "__main__":
    main()
