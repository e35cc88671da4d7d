import numpy as np
import pytest

from models.watch import BOUND, SPREAD, Params, enough_rows, look

PARAMS = Params(fall=0.3, recover=0.1, min_requests=10)
PROMISED = {"chat": 2.0, "code": 1.5}


def served(tau: float | None, requests: int = 10, domain: str = "chat") -> dict[str, dict[str, float | int | None]]:
    return {domain: {"requests": requests, "mean_accepted_length": tau}}


@pytest.mark.parametrize(
    ("domain", "tau", "requests", "fallen"),
    [
        ("chat", 1.6, 10, True),  # 0.4 of the promised 1.0 are gone
        ("chat", 1.75, 10, None),  # neither fallen nor where it should be
        ("chat", 1.95, 10, False),
        ("chat", 1.6, 9, None),  # too few to say
        ("code", 1.3, 10, True),  # 0.4 of the promised 0.5
        ("sql", 1.6, 10, True),  # a domain that the draft never saw is held against the best one
        ("chat", None, 10, None),
    ],
)
def test_a_domain_is_held_against_what_its_draft_was_promoted_for(
    domain: str, tau: float | None, requests: int, fallen: bool | None
) -> None:
    seen = look(PROMISED, served(tau, requests, domain), PARAMS)
    assert {name: standing.fallen for name, standing in seen.items()} == ({} if fallen is None else {domain: fallen})


def test_a_draft_that_promised_nothing_can_not_fall() -> None:
    assert not look({}, served(1.0), PARAMS)


def test_more_lost_wants_fewer_rows_and_a_domain_of_much_other_traffic_more() -> None:
    assert enough_rows(1.0, 200, 0.2) < enough_rows(0.5, 200, 0.2) < enough_rows(0.2, 200, 0.2)
    assert enough_rows(0.5, 200, 0.2) < enough_rows(0.5, 2000, 0.2)
    assert enough_rows(0.0, 200, 0.2) == enough_rows(0.1, 200, 0.2) > 200  # not even all of them would do


@pytest.mark.parametrize(("num_rows", "held_out"), [(200, 0.2), (1000, 0.15)])
def test_with_enough_rows_a_planted_gain_is_shown_in_four_of_five_refreshes(num_rows: int, held_out: float) -> None:
    lost, rng = 0.6, np.random.default_rng(0)
    of_domain = enough_rows(lost, num_rows, held_out)
    assert of_domain < num_rows
    judged, shown = int(num_rows * held_out), 0
    for _ in range(2000):
        brought_back = rng.random(judged) < of_domain / num_rows
        gains = rng.normal(0, SPREAD, judged) + np.where(brought_back, lost / 2, 0.0)
        shown += gains.mean() > BOUND * gains.std(ddof=1) / np.sqrt(judged)
    assert 0.7 < shown / 2000 < 0.9
