import numpy as np
import pytest

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
from models.core.evaluation.paired import Score
from models.types import GateParams

K, ALPHA = 3, allowed_error(1, GateParams().alpha_total)
PARAMS = Params(fall=0.3, recover=0.1, min_requests=10)
PROMISED = {"chat": 2.0, "code": 1.5}


def judged(tau: float, requests: int, domain: str = "chat", promised: dict[str, float] = PROMISED) -> dict[str, bool]:
    judge, accepted = DriftDetector(promised, PARAMS), round(20 * (tau - 1))
    judge.take(AcceptanceCount(number, domain, steps=20, drafted=60, accepted=accepted) for number in range(requests))
    return {name: standing.fallen for name, standing in judge.standings().items()}


@pytest.mark.parametrize(
    ("domain", "tau", "requests", "fallen"),
    [
        ("chat", 1.4, 40, True),
        ("chat", 1.8, 200, None),  # neither fallen nor where it should be
        ("chat", 1.95, 10, False),
        ("chat", 1.4, 9, None),  # too few to say
        ("code", 1.2, 40, True),
        ("code", 1.4, 40, None),
        ("sql", 1.5, 40, None),  # a domain that the draft never saw has nothing to lose
    ],
)
def test_a_domain_is_held_against_what_its_draft_was_promoted_for(
    domain: str, tau: float, requests: int, fallen: bool | None
) -> None:
    assert judged(tau, requests, domain) == ({} if fallen is None else {domain: fallen})


def test_a_draft_that_promised_nothing_can_not_fall() -> None:
    assert judged(1.0, 100, promised={}) == judged(1.0, 100, promised={"chat": 1.0}) == {}


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


def test_thresholds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="recover must be below fall"):
        Params(fall=0.1, recover=0.1)


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

    def passed(of_domain: int, num_runs: int = 200) -> float:
        domains = ["code"] * of_domain + ["chat"] * (num_rows - of_domain)
        shares = {"code": of_domain / num_rows, "chat": 1 - of_domain / num_rows}
        count = 0
        for _ in range(num_runs):
            held = rng.random(num_rows) < held_out
            before = [
                Score(id=str(number), domain=domains[number], steps=20, accepted=30.0)
                for number in np.flatnonzero(held).tolist()
            ]
            gains = [rng.normal(SHARE_BACK * lost if one.domain == "code" else 0.0, SPREAD) for one in before]
            after = [
                one.model_copy(update={"accepted": 20 * (1.5 + gain)}) for one, gain in zip(before, gains, strict=True)
            ]
            evidence = Evidence.start(bound).after(before, after, shares)
            count += decide(evidence, {}, GateParams()).verdict == "passed"
        return count / num_runs

    shown = passed(wanted), passed(wanted // 3)
    print(f"{wanted} of {num_rows} rows: passed {shown[0]:.0%}, with a third {shown[1]:.0%}")
    assert shown[0] >= 0.7
    assert shown[1] < 0.3


@pytest.mark.parametrize(
    ("domain", "promised", "low"),
    [
        ("sql", {}, True),
        ("sql", {"chat": 1.8, "code": 1.6}, True),
        ("sql", {"chat": 1.8, "code": 1.6, "sql": 1.34}, True),
        ("sql", {"chat": 1.8, "code": 1.6, "sql": 1.36}, False),  # half of the others' 1.7
        ("sql", {"sql": 1.05}, False),  # nothing says that more is usual
        ("sql", {"chat": 1.0, "sql": 1.0}, False),
    ],
)
def test_a_domain_is_low_where_its_draft_promises_nothing_or_less_than_half_of_what_is_usual(
    domain: str, promised: dict[str, float], low: bool
) -> None:
    assert is_low(domain, promised) == low


def test_what_is_usual_is_the_median_of_the_others() -> None:
    assert usual_tau("sql", {"a": 1.1, "b": 1.5, "c": 1.9, "sql": 3.0}) == 1.5
    assert usual_tau("sql", {"sql": 3.0}) is None
