"""How often the gate promotes a draft without gain, and how soon one with a gain, by simulation.

    python -m tests.benchmarks.gate --runs 200

One champion is challenged window after window, and the gate is looked at after each. A challenger is a law of
differences in accepted tokens a step; the statistics are the gate's own.

The variance is the demonstration's: on seven runs (docs/results/statistics.md) the bounds of what the gate found for
`chat` (110 conversations) and `code` (27) lay 0.019 to 0.081 below the estimates, which at 95% of Student's t is a
spread of 0.12 to 0.25 from conversation to conversation. The largest is taken. Shares are of the demonstration's τ.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, t
from tqdm import tqdm

from models.core.evaluation.betting import log_growth, log_wealth
from models.core.evaluation.gate import allowed_error
from models.core.evaluation.paired import Score, clusters, gain
from models.recipe import DEFAULT_RECIPE, load_recipe
from tasks.stages.split import MOST_OF_GROUP, stands_for
from tests.benchmarks.scripts import show

TAU, SIGMA = 1.73, 0.25
CONVERSATIONS, HELD_OUT = 200, 0.25
RHO = 0.3
NUM_GROUPS = 60  # of a window; the demonstration's 200 requests of `code` are of 62 modules, the largest has 28
SPLITS = 1000

Floats = NDArray[np.float64]


class Case(NamedTuple):
    """A kind of challenger.

    Attributes:
        gain: share of τ that each is better by.
        cluster_size: conversations that share `RHO` of their variance; they are held out together.
        largest: where it is above 0, clusters are groups of 1 to so many conversations, few of them large, of which the
            gate scores some.
        steeper: share of τ by which a group gains more than one that is asked half as often; the mean of groups stays.
        rare: differences are small gains, and now and then a large loss.
        lasts: windows after which a new challenger comes; None if only when one was given up.
        pool: past drafts, as good as the challengers, of which the best one on what each window trains on is held to
            what it holds out, if it is shown to be better there.
    """

    gain: float
    cluster_size: int = 1
    largest: int = 0
    steeper: float = 0.0
    rare: bool = False
    lasts: int | None = None
    pool: int = 0


CASES = {
    "no gain": Case(0.0),
    "no gain, clusters of 30": Case(0.0, cluster_size=30),
    "no gain, rare large losses": Case(0.0, rare=True),
    "no gain, a new challenger each window": Case(0.0, lasts=1),
    "1% worse": Case(-0.01),
    "5% better": Case(0.05),
    "20% better": Case(0.20),
    "no gain, past drafts at each window": Case(0.0, pool=3),
    "no gain, groups of 1 to 30": Case(0.0, largest=30),
    "no gain, groups of 1 to 30, those asked often gain": Case(0.0, largest=30, steeper=0.05),
}


def simulate(
    case: Case,
    num_runs: int,
    num_windows: int,
    bound: int,
    alpha_total: float,
    rng: np.random.Generator,
    on_window: Callable[[], object] = lambda: None,
) -> list[int]:
    """Return the window, from 1, that each run promoted a challenger at; runs that never did are left out.

    Args:
        case: what the challengers are.
        num_runs: champions.
        num_windows: that each is challenged for.
        bound: K.
        alpha_total: error of a champion.
        rng: of the differences.
        on_window: called after each window.
    """
    promoted: list[int] = []
    judged = np.ones(num_runs)  # challengers of each champion so far
    better, worse = (np.zeros((num_runs, len(log_growth(np.zeros(1), np.zeros(1), 0, bound)))) for _ in range(2))
    challenger, age = np.ones(num_runs), np.zeros(num_runs)
    for window in range(1, num_windows + 1):
        differences, weights, requests = draw(case, len(better), bound, rng)
        returns = np.zeros(len(better), dtype=bool)
        if case.pool:
            tried = choose(case, len(better), bound, rng)
            judged = judged + tried
            growth = log_growth(*draw(case, len(better), bound, rng)[:2], 0.0, bound)
            returns = tried & (log_wealth(growth) >= -np.log(_allowed(judged, alpha_total)))
        better += log_growth(differences, weights, 0.0, bound)
        worse += log_growth(-differences, weights, 0.0, bound)
        age += 1
        wanted = -np.log(_allowed(challenger, alpha_total))
        passed = returns | ((log_wealth(better) >= wanted) & ((differences * requests).sum(axis=1) >= 0))
        promoted += [window] * int(passed.sum())
        given_up = log_wealth(worse) >= wanted
        anew = given_up | (age == case.lasts)
        judged = judged + anew
        challenger, age = np.where(anew, judged, challenger), np.where(anew, 0, age)
        better[anew] = worse[anew] = 0
        better, worse, judged, challenger, age = (of[~passed] for of in (better, worse, judged, challenger, age))
        on_window()
        if not len(better):
            break
    return promoted


def draw(case: Case, num_runs: int, bound: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Draw the held-out differences of one window.

    Args:
        case: what the challenger is.
        num_runs: R.
        bound: K.
        rng: drawn from.

    Returns:
        [R, N] differences in [−K, K], [R, N] weights: 0 for what was not held out, else 1, and [R, N] requests that
        what was held out stands for.
    """
    if case.largest:
        return _draw_groups(case, num_runs, bound, rng)
    size = case.cluster_size
    num_clusters = max(1, round(CONVERSATIONS / size))
    if size == 1:
        num_clusters, held_out = round(CONVERSATIONS * HELD_OUT), np.ones((num_runs, 1))
    else:
        held_out = (rng.random((num_runs, num_clusters)) < HELD_OUT).astype(np.float64)
    shape = (num_runs, num_clusters, size)
    shared = _standard(case, rng, (*shape[:2], 1)) if size > 1 else np.zeros(1)
    own = _standard(case, rng, shape)
    noise = math.sqrt(RHO) * shared + math.sqrt(1 - RHO) * own if size > 1 else own
    differences = np.clip(case.gain * TAU + SIGMA * noise, -bound, bound)
    weights = np.broadcast_to(held_out, shape[:2])
    return differences.mean(axis=2), weights, weights * stands_for(size, CONVERSATIONS)


def _draw_groups(case: Case, num_runs: int, bound: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Draw as `draw` does, groups of sizes that are drawn anew in each window."""
    shape = (num_runs, NUM_GROUPS)
    halvings = np.log2(case.largest) * rng.random(shape) ** 2  # as with the demonstration's modules, most are small
    sizes = np.floor(2**halvings)
    held_out = (rng.random(shape) < HELD_OUT).astype(np.float64)
    scored = np.arange(MOST_OF_GROUP) < sizes[:, :, None]
    own = (_standard(case, rng, (*shape, MOST_OF_GROUP)) * scored).sum(axis=2) / scored.sum(axis=2)
    noise = math.sqrt(RHO) * _standard(case, rng, shape) + math.sqrt(1 - RHO) * own
    tilt = case.steeper * (halvings - np.log2(case.largest) / 3)  # the mean of a square in [0, 1] is a third
    differences = np.clip((case.gain + tilt) * TAU + SIGMA * noise, -bound, bound)
    return differences, held_out, held_out * np.minimum(sizes, stands_for(case.largest, CONVERSATIONS))


def choose(case: Case, num_runs: int, bound: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return in which runs a past draft is shown to be better on what one window trains on, so that the gate tries it.

    What it is then held to are other conversations of the same window, and so its luck here is of no use there.
    """
    count = round(CONVERSATIONS * (1 - HELD_OUT))
    drawn = np.clip(case.gain * TAU + SIGMA * _standard(case, rng, (num_runs, case.pool, count)), -bound, bound)
    error = drawn.std(axis=2, ddof=1) / math.sqrt(count)
    best: NDArray[np.bool_] = (drawn.mean(axis=2) > t.ppf(0.975, count - 1) * error).any(axis=1)
    return best


def _allowed(challengers: Floats, alpha_total: float) -> Floats:
    return np.array([allowed_error(int(number), alpha_total) for number in challengers])


def _standard(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw with mean 0 and variance 1: normal, or one loss of 7 in 50 against many small gains."""
    if case.rare:
        return np.where(rng.random(shape) < 0.02, -7.0, 1 / 7)
    return rng.standard_normal(shape)


def coverage(num_splits: int, rng: np.random.Generator) -> float:
    """Return how often the 95% interval of one window's gain holds what fresh prompts of the same traffic give.

    In each split two domains come in clusters of 1 to 30 conversations, half of the variance is the cluster's, and a
    quarter of the clusters is held out.
    """
    hits = 0
    for _ in range(num_splits):
        champion, challenger = [], []
        for domain, mean, count in (("chat", 0.0, 110), ("code", 0.4, 40)):
            sizes = np.minimum(30, rng.geometric(0.4, count))
            for number in np.flatnonzero(rng.random(count) < HELD_OUT).tolist():
                shared = rng.normal(0, SIGMA * math.sqrt(0.5))
                for member in range(int(sizes[number])):
                    name = f"{domain} {number} {member}"
                    score = Score(id=name, domain=domain, cluster=f"{domain} {number}", steps=20, accepted=20.0)
                    change = mean + shared + rng.normal(0, SIGMA * math.sqrt(0.5))
                    champion.append(score)
                    challenger.append(score.model_copy(update={"accepted": max(0.0, 20 * (1 + change))}))
        found = gain(clusters(champion, challenger, {"chat": 110, "code": 40}))
        hits += found.low <= 0.4 * 40 / 150 <= found.high
    return hits / num_splits


def summary(windows: Sequence[int], num_runs: int) -> dict[str, Any]:
    """Return the share of runs that promoted, its 95% interval, and the window at which half of all runs had."""
    count, ordered = len(windows), sorted(windows)
    low = float(beta.ppf(0.025, count, num_runs - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, num_runs - count)) if count < num_runs else 1.0
    half = (num_runs + 1) // 2
    return {
        "promoted": count / num_runs,
        "low": round(low, 4),
        "high": round(high, 4),
        "median_window": ordered[half - 1] if count >= half else None,
    }


def main() -> None:
    """Simulate each case."""
    parser = argparse.ArgumentParser(description="Simulate the gate.")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    parser.add_argument("--runs", type=int, default=500, help="champions of each kind of challenger")
    parser.add_argument("--windows", type=int, default=1000, help="that a champion is challenged for")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe)
    bound, alpha = recipe.num_draft_tokens, recipe.gate.alpha_total
    found: dict[str, Any] = {}
    for number, (name, case) in enumerate(CASES.items()):
        rng = np.random.default_rng([recipe.seed, number])
        with tqdm(total=given.windows, desc=name) as bar:
            windows = simulate(case, given.runs, given.windows, bound, alpha, rng, bar.update)
        found[name] = summary(windows, given.runs)
    covered = coverage(SPLITS, np.random.default_rng([recipe.seed, 99]))
    rows = [[name, *_cells(one)] for name, one in found.items()]
    columns = ["challengers", "ever promoted (95%)", "half of the runs by window"]
    title = f"{given.runs} champions, {given.windows} windows of {CONVERSATIONS} conversations, a quarter held out"
    figures = {"recipe": recipe.name, "runs": given.runs, "windows": given.windows, "sigma": SIGMA, "tau": TAU}
    show({**figures, "cases": found, "coverage": covered}, title, columns, rows)


def _cells(one: dict[str, Any]) -> tuple[str, str]:
    share = f"{one['promoted']:.1%} ({one['low']:.1%} to {one['high']:.1%})"
    return share, "–" if one["median_window"] is None else str(one["median_window"])


if __name__ == "__main__":
    main()
