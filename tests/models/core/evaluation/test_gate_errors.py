"""The gate's error rates and power, with planted truths; `python -m tests.benchmarks.gate` has more runs."""

import numpy as np
import pytest

from models.core.evaluation.betting import BETS, NUM_BINS, log_growth, log_wealth
from models.core.evaluation.gate import Evidence, decide
from models.core.evaluation.paired import Score
from models.types import GateParams
from tests.benchmarks import gate
from tests.benchmarks.gate import CASES, Case, choose, coverage, draw, simulate, summary

K, ALPHA = 3, 0.05


def promoted(name: str, num_runs: int = 400, num_windows: int = 200) -> list[int]:
    return simulate(CASES[name], num_runs, num_windows, K, ALPHA, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gain <= 0])
def test_a_draft_without_gain_is_ever_promoted_in_one_of_twenty_lines_at_most(name: str) -> None:
    found = summary(promoted(name), 400)
    print(name, found)
    assert found["promoted"] <= ALPHA


def test_a_gain_of_20_percent_needs_one_window_and_one_of_5_percent_four() -> None:
    for name, most in (("20% better", 1), ("5% better", 4)):
        found = summary(promoted(name, num_windows=20), 400)
        print(name, found)
        assert found["promoted"] == 1
        assert found["median_window"] <= most


def test_a_past_draft_is_seldom_tried_without_a_gain_and_returns_with_one_at_once() -> None:
    rng = np.random.default_rng(0)
    assert choose(CASES["no gain, past drafts at each window"], 2000, K, rng).mean() == pytest.approx(0.073, abs=0.02)
    good = Case(0.2, pool=3)
    assert choose(good, 200, K, rng).all()
    assert len(simulate(good, 200, 1, K, ALPHA, rng)) > 180


@pytest.mark.slow
def test_past_drafts_lift_no_error_where_conversations_differ_as_widely_as_betting_errs_most_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "SIGMA", 1.0)
    found = summary(promoted("no gain, past drafts at each window"), 400)
    print("past drafts, spread 1.0", found)
    assert found["promoted"] <= ALPHA


def test_the_simulation_promotes_when_the_gate_does() -> None:
    params, rng = GateParams(), np.random.default_rng(3)
    for name in ("no gain", "5% better", "no gain, clusters of 30", "no gain, groups of 1 to 30"):
        evidence, growth = Evidence.start(K), np.zeros((1, 5))
        for window in range(12):
            differences, weights, requests = draw(CASES[name], 1, K, rng)
            inside = weights[0] > 0
            held_out, sizes = differences[0][inside], requests[0][inside]
            growth += log_growth(differences, weights, 0.0, K)
            if not len(held_out):
                continue
            champion = [
                Score(id=f"{window} {number}", domain="chat", weight=size, steps=20, accepted=30.0)
                for number, size in enumerate(sizes.tolist())
            ]
            challenger = [
                one.model_copy(update={"accepted": 20 * (1.5 + change)})
                for one, change in zip(champion, held_out.tolist(), strict=True)
            ]
            evidence = evidence.after(champion, challenger)
            wealth = float(log_wealth(growth)[0])
            rounded = evidence.num_clusters * 2 * BETS.max() / NUM_BINS  # log wealth that values rounded down may cost
            assert 0 <= wealth - evidence.test.log_wealth() <= 2 * rounded
            if abs(wealth + np.log(evidence.alpha(params))) > 2 * rounded and evidence.last.value >= 0:
                passes = wealth > -np.log(evidence.alpha(params))
                assert (decide(evidence, {}, params).verdict == "passed") == passes


def test_a_windows_interval_covers_what_fresh_prompts_of_its_traffic_give() -> None:
    covered = coverage(200, np.random.default_rng(0))
    print("covered", covered)
    assert covered >= 0.93


def test_a_cluster_is_held_out_as_a_whole_and_shares_what_it_is_said_to() -> None:
    case = Case(0.0, cluster_size=30)
    means, weights, _ = draw(case, 4000, K, np.random.default_rng(0))
    assert {*np.unique(weights)} == {0, 1}
    assert weights.mean() == pytest.approx(gate.HELD_OUT, abs=0.01)
    assert means.std() == pytest.approx(gate.SIGMA * np.sqrt(gate.RHO + (1 - gate.RHO) / 30), rel=0.01)


def test_groups_are_of_unequal_sizes_and_the_planted_truth_is_that_of_groups() -> None:
    rng = np.random.default_rng(0)
    for case in (Case(0.0, largest=30), Case(0.0, largest=30, steeper=0.05)):
        differences, weights, requests = draw(case, 4000, K, rng)
        sizes, inside = requests[weights > 0], differences[weights > 0]
        assert weights.mean() == pytest.approx(gate.HELD_OUT, abs=0.01)
        assert (sizes.min(), np.median(sizes), sizes.max()) == (1, 2, 10)  # a twentieth of 200 conversations at most
        assert inside.mean() == pytest.approx(0, abs=0.005)
        assert (np.average(inside, weights=sizes) > 0.05) == (case.steeper > 0)
