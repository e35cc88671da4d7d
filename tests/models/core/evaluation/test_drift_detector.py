import numpy as np
import pytest
from numpy.typing import NDArray

from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.drift_detector import (
    FIRST_WEIGHT,
    NO_DOUBT,
    SHARE_BACK,
    SPREAD,
    DriftDetector,
    Params,
    doubt,
    enough_rows,
    is_low,
    usual_tau,
)
from models.core.evaluation.gate import Evidence, allowed_error, decide
from models.types import GateParams
from tests.benchmarks.falls import CASES, TRAFFIC, WITHIN, simulate
from tests.models.core.evaluation.conversations import changed, conversations

K, ALPHA = 3, allowed_error(1, GateParams().alpha_total)
PARAMS = Params(fall=0.3, recover=0.1, min_requests=10)
PROMISED = {"chat": 2.0, "code": 1.5}


def has_fallen_in(
    tau: float, requests: int, domain: str = "chat", promised: dict[str, float] = PROMISED
) -> dict[str, bool]:
    judge, accepted = DriftDetector(promised, PARAMS), round(20 * (tau - 1))
    judge.take(AcceptanceCount(number, domain, steps=20, drafted=60, accepted=accepted) for number in range(requests))
    return {name: standing.fallen for name, standing in judge.standings().items()}


@pytest.mark.parametrize(
    ("domain", "tau", "requests", "fallen"),
    [
        ("chat", 1.4, 40, True),
        ("chat", 1.8, 200, None),  # neither fallen nor where it should be
        ("chat", 1.95, 10, False),
        ("chat", 1.95, 9, None),  # too few to say
        ("chat", 1.4, 9, None),
        ("code", 1.2, 40, True),
        ("code", 1.4, 40, None),
        ("sql", 1.5, 40, None),  # a domain that the draft never saw has nothing to lose
    ],
)
def test_a_domain_is_held_against_what_was_promised(
    domain: str, tau: float, requests: int, fallen: bool | None
) -> None:
    assert has_fallen_in(tau, requests, domain) == ({} if fallen is None else {domain: fallen})


def test_a_draft_that_promised_nothing_can_not_fall_and_thresholds_may_not_exclude_each_other() -> None:
    assert has_fallen_in(1.0, 100, promised={}) == has_fallen_in(1.0, 100, promised={"chat": 1.0}) == {}
    with pytest.raises(ValueError, match="recover must be below fall"):
        Params(fall=0.1, recover=0.1)


def test_evidence_by_hand() -> None:
    steps, accepted = np.array(20.0), np.array(4.0)
    found = doubt(NO_DOUBT, steps, accepted, np.array(1.0), PARAMS)
    # (0.9 − 0.7) / 0.75² × (20 × 0.8 − 4) / 20
    assert found.evidence == pytest.approx(0.2 / 0.5625 * 0.6)
    # The first one was 16 accepted tokens off what was promised, 0.8 a mean step.
    variance = (0.8**2 + FIRST_WEIGHT * 0.5625) / (1 + FIRST_WEIGHT)
    again = doubt(found, steps, accepted, np.array(1.0), PARAMS)
    assert again.evidence == pytest.approx(found.evidence + 0.2 / variance * 0.6)
    good = doubt(NO_DOUBT, steps, np.array(20.0), np.array(1.0), PARAMS)
    assert good.evidence == 0


def test_more_lost_wants_fewer_rows_and_a_domain_of_much_other_traffic_more() -> None:
    def enough(lost: float, num_rows: int = 200, alpha: float = ALPHA) -> int:
        return enough_rows(lost, num_rows, 0.25, K, alpha)

    assert enough(1.0) < enough(0.7) < enough(0.4)
    assert enough(1.0) < enough(1.0, num_rows=1000)
    assert enough(1.0) < enough(1.0, alpha=ALPHA / 4)
    assert enough(0.0) == enough(0.1) > 200  # not even all of them would do
    assert enough(0.0) == enough(0.0, num_rows=1000)  # and so many of its own would


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "held_out", "lost", "bound"), [(240, 0.25, 0.67, 3), (1000, 0.15, 0.8, 3), (400, 0.4, 0.8, 7)]
)
def test_the_gate_passes_a_planted_gain_with_enough_rows_in_most_refreshes_and_with_a_third_in_few(
    num_rows: int, held_out: float, lost: float, bound: int
) -> None:
    wanted, rng = enough_rows(lost, num_rows, held_out, bound, ALPHA), np.random.default_rng(0)
    assert wanted < num_rows

    def passed(of_domain: int) -> float:
        rows = [*conversations(of_domain, "a", "code", 1.5), *conversations(num_rows - of_domain, "b", "chat", 1.5)]
        shares, verdicts = {"code": of_domain / num_rows, "chat": 1 - of_domain / num_rows}, []
        for _ in range(200):
            before = [rows[place] for place in np.flatnonzero(rng.random(num_rows) < held_out)]
            after = changed(before, [rng.normal(SHARE_BACK * lost * (one.domain == "code"), SPREAD) for one in before])
            evidence = Evidence.start(bound).after(before, after, shares)
            verdicts.append(decide(evidence, {}, GateParams()).verdict)
        return verdicts.count("passed") / 200

    shown, fewer = passed(wanted), passed(wanted // 3)
    print(f"{wanted} of {num_rows} rows: passed {shown:.0%}, with a third {fewer:.0%}")
    assert shown >= 0.7
    assert fewer < 0.3


@pytest.mark.parametrize(
    ("promised", "usual", "low"),
    [
        ({}, None, True),
        ({"chat": 1.8, "code": 1.6, "math": 1.1}, 1.6, True),
        ({"chat": 1.8, "code": 1.6, "sql": 1.34}, 1.7, True),
        ({"chat": 1.8, "code": 1.6, "sql": 1.36}, 1.7, False),
        ({"sql": 1.05}, None, False),  # nothing says that more is usual
        ({"chat": 1.0, "sql": 1.0}, 1.0, False),
    ],
)
def test_a_domain_is_low_where_its_draft_promises_nothing_or_less_than_half_of_the_others_median(
    promised: dict[str, float], usual: float | None, low: bool
) -> None:
    assert usual_tau("sql", promised) == (None if usual is None else pytest.approx(usual))
    assert is_low("sql", promised) == low


# What it says of served acceptance whose truth is known; `python -m tests.benchmarks.falls` has more runs.
def told(name: str, domain: str) -> NDArray[np.float64]:
    return simulate(TRAFFIC[domain], CASES[name], Params(), 50, np.random.default_rng(0))


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


@pytest.mark.slow
def test_in_a_week_without_a_change_no_fall_is_told() -> None:
    assert not np.isfinite(told("a week without a change", "chat")).any()


def test_the_service_tells_a_fall_where_the_simulation_does() -> None:
    rng, gain = np.random.default_rng(2), 0.7
    judge, tallies = DriftDetector({"chat": 1 + gain}, Params()), []
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
