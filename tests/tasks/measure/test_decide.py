"""Whether a row differs, is level or needs more seeds: by hand, and by a simulation in which the truth is known."""

import itertools

import numpy as np
import pytest
from scipy.stats import t as student

from models.core.evaluation.spread import Mean
from tasks.measure.compare_methods import ALPHA, Margin, Verdict, decide, decided, looks, seeds_needed

MARGIN, FIRST, MOST = 0.1, 3, 12
NUM_RUNS = 1500


def run(rng: np.random.Generator, truth: float, deviation: float) -> tuple[Verdict, list[float]]:
    """One row: seeds are added until a look decides."""
    steps, drawn = looks(FIRST, MOST), rng.normal(truth, deviation, MOST).tolist()
    for step in steps:
        verdict = decide(drawn[:step], MARGIN, len(steps))
        if verdict != "undecided":
            return verdict, drawn[:step]
    return "undecided", drawn


def test_looks_are_half_as_many_more_each_time() -> None:
    assert looks(3, 12) == [3, 5, 8, 12]
    assert looks(3, 3) == [3] and looks(5, 6) == [5, 6]


def test_three_outcomes_by_hand() -> None:
    reach = student.ppf(0.975, 2) * 0.01 / 3**0.5  # of differences 0.01 apart, looked at once
    near = [0.03 - 0.01, 0.03, 0.03 + 0.01]
    assert reach == pytest.approx(0.02484, abs=1e-4)
    assert decide(near, 0.04, 1) == "differs"
    assert decide([-0.01, 0.0, 0.01], 0.03, 1) == "level"
    assert decide([-0.01, 0.0, 0.01], 0.02, 1) == "undecided"
    assert decide(near, 0.05, 4) == "undecided"  # each of four looks has a quarter of the error
    assert decide([0.5], 1.0, 1) == "undecided"


def test_a_difference_that_is_sure_but_within_the_margin_is_level() -> None:
    assert decide([0.0040, 0.0041, 0.0039], 0.05, 1) == "level"
    assert decide([0.0040, 0.0041, 0.0039], 0.003, 1) == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.03, 0.1, 0.3])
def test_of_many_rows_with_a_known_truth_few_are_told_wrongly(deviation: float) -> None:
    rng = np.random.default_rng(0)
    of_none = [run(rng, 0.0, deviation)[0] for _ in range(NUM_RUNS)]
    of_margin = [run(rng, MARGIN, deviation)[0] for _ in range(NUM_RUNS)]
    wrong = of_none.count("differs") / NUM_RUNS, of_margin.count("level") / NUM_RUNS
    print(f"deviation {deviation}: differs where nothing does {wrong[0]:.3f}, level at the margin {wrong[1]:.3f}")
    # 0.05 and three standard errors of such a share.
    assert max(wrong) <= ALPHA + 3 * (0.05 * 0.95 / NUM_RUNS) ** 0.5
    if deviation == 0.03:  # and where there is enough to see, it is seen
        assert of_none.count("level") > 0.9 * NUM_RUNS and of_margin.count("differs") > 0.9 * NUM_RUNS


def test_as_many_more_seeds_as_are_asked_for_decide_most_rows() -> None:
    rng = np.random.default_rng(1)
    decided = asked = 0
    for truth, _ in itertools.product((0.0, 0.05, 0.2), range(300)):
        drawn = rng.normal(truth, 0.15, MOST).tolist()
        if decide(drawn, MARGIN, 1) != "undecided":
            continue
        more = seeds_needed(drawn, MARGIN, 1)
        asked += 1
        decided += decide(drawn + rng.normal(truth, 0.15, more).tolist(), MARGIN, 1) != "undecided"
    print(f"{decided} of {asked} undecided rows are decided by as many more seeds as were asked for")
    assert asked > 100 and decided > 0.5 * asked


def test_documents_of_one_seed_decide_what_seeds_could_not() -> None:
    level = Mean([0.01, -0.01, 0.0, 0.0])
    assert decide([level], MARGIN, 1) == "level" and decide([0.0], MARGIN, 1) == "undecided"
    assert decide([Mean([0.5, 0.51])], MARGIN, 1) == "differs"
    unsure = [Mean([0.3, -0.3, 0.1, -0.1])]
    assert decide(unsure, MARGIN, 1) == "undecided"
    cells = {"dense": [{"kl": Mean([1.0, 2.0])}], "half": [{"kl": Mean([1.5, 2.51])}], "odd": [{"kl": None}]}
    margin = Margin("kl", MARGIN, 4)
    assert decided(cells, "dense", margin, 1) == {"half": "differs", "odd": "no figure"}
    more = seeds_needed(unsure, MARGIN, 1)
    # Documents vary by 0.0667; with as many a seed the interval is below the margin after 31 of them or 8 seeds.
    assert more == 7


@pytest.mark.slow
def test_what_nobody_runs_has_no_number() -> None:
    assert seeds_needed([0.5], 0.1, 1) is None
    assert seeds_needed([-100.0, 100.0], 1e-3, 1) is None
    assert seeds_needed([0.0, 0.0, 0.0], 0.1, 1) == 1
