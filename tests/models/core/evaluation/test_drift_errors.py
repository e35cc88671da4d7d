"""What the trigger says of served acceptance whose truth is known; `python -m tests.benchmarks.falls` has more runs."""

import numpy as np
import pytest
from numpy.typing import NDArray

from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.drift_detector import DriftDetector, Params
from tests.benchmarks.falls import CASES, TRAFFIC, WITHIN, _share_behind, simulate

PARAMS = Params()


def told(name: str, domain: str) -> NDArray[np.float64]:
    return simulate(TRAFFIC[domain], CASES[name], PARAMS, 50, np.random.default_rng(0))


@pytest.mark.parametrize("domain", TRAFFIC)
def test_a_fall_of_30_percent_is_told_within_6000_requests_and_a_new_domains_within_hundreds(domain: str) -> None:
    after = told("30% lost", domain)
    print(f"{domain}: median {np.median(after):.0f}, within {WITHIN}: {(after <= WITHIN).mean():.0%}")
    assert (after <= WITHIN).mean() >= 0.9
    assert (told("90% lost from the first request, as in a new domain", domain) <= 300).mean() >= 0.9


@pytest.mark.parametrize("domain", TRAFFIC)
def test_a_fall_at_the_later_places_alone_is_told_as_soon_as_one_at_all_that_costs_as_much(domain: str) -> None:
    everywhere, later = (told(name, domain) for name in ("30% lost", "30% lost, all of it behind the first place"))
    print(f"{domain}: median {np.median(everywhere):.0f} and {np.median(later):.0f}")
    assert (later <= WITHIN).mean() >= 0.9
    assert np.median(later) == pytest.approx(np.median(everywhere), rel=0.3)


def test_what_places_give_follows_from_the_gain() -> None:
    gain = np.array([0.0, 0.5 + 0.25 + 0.125, 3.0])  # a chance of 0, 1/2 and 1
    assert _share_behind(gain, 0)[1:] == pytest.approx([1, 1])
    assert _share_behind(gain, 1) == pytest.approx([0, 0.375 / 0.875, 2 / 3])
    assert _share_behind(gain, 2) == pytest.approx([0, 0.125 / 0.875, 1 / 3])


@pytest.mark.slow
def test_in_a_week_without_a_change_no_fall_is_told() -> None:
    assert not np.isfinite(told("a week without a change", "chat")).any()


def test_the_service_tells_a_fall_where_the_simulation_does() -> None:
    rng, gain = np.random.default_rng(2), 0.7
    judge, tallies = DriftDetector({"chat": 1 + gain}, PARAMS), []
    for number in range(600):
        steps = int(rng.integers(10, 30))
        accepted = min(3 * steps, int(steps * rng.gamma(8, gain * (1.1 if number < 300 else 0.4) / 8)))
        tallies.append(AcceptanceCount(number, "chat", steps, 3 * steps, accepted))
    judge.take(tallies[:300])
    assert judge.standings()["chat"].fallen is False
    assert judge.doubted() == frozenset()
    doubted = False
    for one in tallies[300:450]:
        judge.take([one])
        fallen = "chat" in (found := judge.standings()) and found["chat"].fallen
        doubted = doubted or judge.doubted() == {"chat"}
        assert not (fallen and judge.doubted()), "what is told needs no more evidence"
    assert doubted
    assert judge.standings()["chat"].fallen is True
    judge.take([one._replace(accepted=one.steps) for one in tallies[450:]])
    assert judge.standings()["chat"].fallen is False
