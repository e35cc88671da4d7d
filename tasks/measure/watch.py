"""How soon the watch takes back a draft that does worse, and how often one that does not, by simulation.

Requests are drawn whose truth is known, from three domains, and looked at as the watch does
(models/evaluation/lookback.py): all findings of all looks count, and no draft is settled. They differ by 0.5 in τ, and
the two drafts by 0.3 on one request, which is more than conversations of the demo do. `redraft bench gate` runs it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.views.figures import draw_shares
from infra.views.results import Grid, Report
from models.evaluation.betting import BETS, log_wealth
from models.evaluation.lookback import allowed_errors, bound_of
from tasks.measure.run import Run

BETWEEN_REQUESTS, BETWEEN_DRAFTS = 0.5, 0.3  # standard deviations of τ
SHARES = {"chat": 0.5, "code": 0.3, "math": 0.2}
WEEK_S = 7 * 24 * 3600.0
LOOKS = 250
WITHIN = 200
AIM_FALSE, AIM_FOUND = 0.01, 0.95

Floats = NDArray[np.float64]


class Truth(NamedTuple):
    """What is planted: τ of the draft before, and by domain what share of it the promoted draft has."""

    tau: float
    kept: Mapping[str, float]


class Rules(NamedTuple):
    """What the watch is set to."""

    num_draft_tokens: int
    floor: float
    alpha: float
    per_look: int


def measure(run: Run, num_runs: int) -> Report:
    """Simulate a week without a loss, and losses of several sizes.

    Args:
        run: the benchmark; only its recipe is used.
        num_runs: how often each is simulated.
    """
    recipe = run.recipe
    rules = Rules(recipe.num_draft_tokens, recipe.gate.floor, recipe.watch.alpha, recipe.watch.per_look)
    week = round(WEEK_S / recipe.watch.period_s)
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
    found: dict[str, list[float]] = {}
    with run.bar("simulating", len(truths)) as bar:
        for name, (truth, num_looks) in truths.items():
            key = name.replace(" ", "-").replace(",", "").replace("%", "")
            cell = run.cells.keep(key, lambda: _cell(truth, rules, num_looks, num_runs, recipe.seed))  # noqa: B023
            found[name] = [math.inf if one is None else one for one in cell["requests"]]
            bar.advance()
    return _report(run, found)


def requests_until_taken_back(
    truth: Truth, rules: Rules, num_looks: int, num_runs: int, rng: np.random.Generator
) -> Floats:
    """Return [R] the requests after which each run of the watch finds a loss; infinite where none of its looks does."""
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


def _cell(truth: Truth, rules: Rules, num_looks: int, num_runs: int, seed: int) -> dict[str, list[float | None]]:
    found = requests_until_taken_back(truth, rules, num_looks, num_runs, np.random.default_rng(seed))
    return {"requests": [float(one) if np.isfinite(one) else None for one in found]}


def _report(run: Run, found: Mapping[str, list[float]]) -> Report:
    ever = {name: float(np.isfinite(after).mean()) for name, after in found.items()}
    within = {name: float((np.array(after) <= WITHIN).mean()) for name, after in found.items()}
    median = {name: float(np.median(after)) for name, after in found.items()}
    rows = [
        (name, f"{ever[name]:.1%}", f"{within[name]:.1%}", f"{median[name]:.0f}" if ever[name] > 0.5 else "–")
        for name in found
    ]
    false = ever[next(iter(found))]
    soon = min(share for name, share in within.items() if name.startswith("worse by 10%"))
    picture = run.folder / "watch.png"
    losses = {
        name: np.minimum(after, LOOKS * run.recipe.watch.per_look).tolist()
        for name, after in found.items()
        if "worse" in name
    }
    draw_shares(losses, "requests compared until it is taken back", picture)
    failures = [] if false <= AIM_FALSE and soon >= AIM_FOUND else ["the watch misses an aim"]
    return Report(
        figures={
            "taken_back": {
                name: {"ever": ever[name], "within": within[name], "median": median[name] if ever[name] > 0.5 else None}
                for name in found
            }
        },
        grids=[Grid("drafts taken back", ("planted", "ever", f"within {WITHIN} requests", "median requests"), rows)],
        notes=[f"The watch: {len(next(iter(found.values()))):,} runs each; all but the week end after {LOOKS} looks."],
        verdict=(
            f"Without a loss {false:.1%} of drafts are taken back in a week (aim: {AIM_FALSE:.0%} at most), "
            f"with a loss of 10% {soon:.1%} and more within {WITHIN} requests (aim: {AIM_FOUND:.0%})."
        ),
        failures=failures,
        picture=picture,
    )
