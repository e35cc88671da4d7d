"""How soon the post-promotion test rolls back a worse draft, and how often one that is no worse, by simulation.

    python -m tests.benchmarks.rollback_delay --runs 200

Requests are drawn whose truth is known, from three domains, and looked at as the test does
(models/core/evaluation/post_promotion_test.py): all findings of all looks count, and no draft is settled. They differ
by 0.5 in τ, and the two drafts by 0.3 on one request, which is more than conversations of the demo do.
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.core.evaluation.betting import BETS, log_wealth
from models.core.evaluation.post_promotion_test import allowed_errors, bound_of
from models.recipe import DEFAULT_RECIPE, load_recipe
from tests.benchmarks.scripts import cells, show, summary

BETWEEN_REQUESTS, BETWEEN_DRAFTS = 0.5, 0.3  # standard deviations of τ
SHARES = {"chat": 0.5, "code": 0.3, "math": 0.2}
WEEK_S = 7 * 24 * 3600.0
LOOKS = 250
WITHIN = 200

Floats = NDArray[np.float64]


class Truth(NamedTuple):
    """What is planted: τ of the draft before, and by domain what share of it the promoted draft has."""

    tau: float
    kept: Mapping[str, float]


class Rules(NamedTuple):
    """What the test is set to."""

    num_draft_tokens: int
    floor: float
    alpha: float
    per_look: int


def requests_until_rolled_back(
    truth: Truth, rules: Rules, num_looks: int, num_runs: int, rng: np.random.Generator
) -> Floats:
    """Return [R] the requests after which each run of the test finds a loss; infinite where none of its looks does."""
    found = np.full(num_runs, np.inf)
    errors = allowed_errors(rules.alpha)
    wanted = np.array([-math.log(next(errors)) for _ in range(1 + len(SHARES))])
    growth = np.zeros((num_runs, 1 + len(SHARES), len(BETS)))
    for look in range(1, num_looks + 1):
        growth += _growth(truth, rules, num_runs, rng)
        late = np.isinf(found) & (log_wealth(growth) >= wanted).any(axis=1)
        found[late] = look * rules.per_look
    return found


def _growth(truth: Truth, rules: Rules, num_runs: int, rng: np.random.Generator) -> Floats:
    """Return [R, 1 + domains, B] what a look adds: to the finding on all requests, then to each domain's."""
    size = (num_runs, rules.per_look)
    domain = rng.choice(len(SHARES), size, p=list(SHARES.values()))
    easy = truth.tau + BETWEEN_REQUESTS * rng.standard_normal(size)
    own = BETWEEN_DRAFTS / math.sqrt(2) * rng.standard_normal((2, *size))
    least = 1 / (rules.num_draft_tokens + 1)
    new, previous = 1 / np.clip(easy + own, 1.0, 1 / least)
    new = np.clip(new / np.array([truth.kept[name] for name in SHARES])[domain], least, 1.0)
    parts = []
    for place, allowed in enumerate((0.0, *[rules.floor] * len(SHARES)), start=-1):
        odds = ((1 - allowed) * new - previous) / bound_of(allowed, least) * ((domain == place) | (place < 0))
        parts.append(np.stack([np.log1p(bet * odds).sum(axis=1) for bet in BETS], axis=-1))
    return np.stack(parts, axis=1)


def main() -> None:
    """Simulate a week without a loss, and losses of several sizes."""
    parser = argparse.ArgumentParser(description="Simulate how soon a draft that does worse is taken back.")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    parser.add_argument("--runs", type=int, default=500, help="how often each loss is simulated")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe)
    rules = Rules(
        recipe.num_draft_tokens,
        recipe.gate.floor,
        recipe.post_promotion_test.alpha,
        recipe.post_promotion_test.per_look,
    )
    week = round(WEEK_S / recipe.post_promotion_test.period_s)
    truths = {
        f"a week without a loss, {week:,} looks": (Truth(1.6, dict.fromkeys(SHARES, 1.0)), week),
        "better by 5%": (Truth(1.6, dict.fromkeys(SHARES, 1.05)), LOOKS),
        "worse by 5%": (Truth(1.6, dict.fromkeys(SHARES, 0.95)), LOOKS),
        "worse by 10%, τ 1.6": (Truth(1.6, dict.fromkeys(SHARES, 0.9)), LOOKS),
        "worse by 10%, τ 2": (Truth(2.0, dict.fromkeys(SHARES, 0.9)), LOOKS),
        "worse by 10%, τ 3": (Truth(3.0, dict.fromkeys(SHARES, 0.9)), LOOKS),
        "worse by 20%": (Truth(1.6, dict.fromkeys(SHARES, 0.8)), LOOKS),
        "chat better by 10%, math worse by 30%": (Truth(1.6, {"chat": 1.1, "code": 1.0, "math": 0.7}), LOOKS),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (truth, num_looks) in tqdm(truths.items()):
        after = requests_until_rolled_back(truth, rules, num_looks, given.runs, np.random.default_rng(recipe.seed))
        found[name] = summary(after, WITHIN)
    rows = [[name, *cells(one)] for name, one in found.items()]
    columns = ["planted", "ever", f"within {WITHIN} requests", "median requests"]
    show({"recipe": recipe.name, "runs": given.runs, "taken_back": found}, "drafts taken back", columns, rows)


if __name__ == "__main__":
    main()
