import pytest

from models.watch import AcceptanceWatch, Params

PARAMS = Params(fall=0.3, recover=0.1, min_requests=10, cooldown_s=100)
PROMISED = {"chat": 2.0, "code": 1.5}


def served(tau: float | None, requests: int = 10, domain: str = "chat") -> dict[str, dict[str, float | int | None]]:
    return {domain: {"requests": requests, "mean_accepted_length": tau}}


@pytest.mark.parametrize(
    ("domain", "tau", "requests", "told"),
    [
        ("chat", 1.6, 10, True),  # 0.4 of the promised 1.0 are gone
        ("chat", 1.75, 10, False),
        ("chat", 1.6, 9, False),  # too few to say
        ("code", 1.4, 10, False),  # 0.2 of the promised 0.5
        ("sql", 1.6, 10, True),  # a domain that the draft never saw is held against the best one
        ("chat", None, 10, False),
    ],
)
def test_a_domain_is_held_against_what_its_draft_was_promoted_for(
    domain: str, tau: float | None, requests: int, told: bool
) -> None:
    found = AcceptanceWatch(PARAMS).see("1", PROMISED, served(tau, requests, domain), 0.0)
    assert list(found) == ([domain] if told else [])


def test_a_fall_is_told_once_until_it_recovered_and_the_time_is_over() -> None:
    watch = AcceptanceWatch(PARAMS)
    seen = [
        (1.6, 0.0),
        (1.5, 200.0),
        (1.75, 300.0),
        (1.6, 400.0),
        (1.95, 500.0),
        (1.6, 600.0),
        (1.95, 610.0),
        (1.6, 620.0),
    ]
    told = [bool(watch.see("1", PROMISED, served(tau), now_s)) for tau, now_s in seen]
    # Still fallen; on the edge; still fallen; recovered; told anew; recovered; within the cool-down.
    assert told == [True, False, False, False, False, True, False, False]


def test_another_draft_is_told_of_anew_after_the_cool_down() -> None:
    watch = AcceptanceWatch(PARAMS)
    assert watch.see("1", PROMISED, served(1.5), 0.0)
    assert not watch.see("2", PROMISED, served(1.5), 50.0)
    assert watch.see("2", PROMISED, served(1.5), 150.0)


def test_a_draft_that_promised_nothing_can_not_fall() -> None:
    assert not AcceptanceWatch(PARAMS).see("1", {}, served(1.0), 0.0)
