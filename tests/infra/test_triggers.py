"""Every state by every event, and the waits on a clock that jumps."""

from itertools import product

import pytest

from infra import triggers
from infra.triggers import Due, Fall, Fallen, Fell, Looked, Ok, Recovered, Retry, Running

RETRY = Retry(first_s=60, most_s=500)
FALL = Fall(draft=3, promised=1.7, served=1.1, since_ms=1_000)
WAITING = FALL.model_copy(update={"attempts": 1, "wait_from_ms": 100_000, "wait_s": 60.0})
TWICE = FALL.model_copy(update={"attempts": 2, "wait_from_ms": 200_000, "wait_s": 120.0})
AGAIN = FALL.model_copy(update={"wait_from_ms": 200_000, "wait_s": 60.0})
OTHER = Fall(draft=4, promised=1.8, served=1.2, since_ms=200_000)

LOW = FALL.model_copy(update={"why": "low"})
LOW_WAITING = WAITING.model_copy(update={"why": "low"})

FELL = Fell(draft=3, promised=1.7, served=1.0, now_ms=200_000)
FELL_WITH_ANOTHER = Fell(draft=4, promised=1.8, served=1.2, now_ms=200_000)
ENOUGH, TOO_FEW = Looked(enough=True, now_ms=200_000), Looked(enough=False, now_ms=200_000)
IS_LOW = Fell(draft=4, promised=1.6, served=1.2, now_ms=200_000, why="low", attempts=2)
LOW_NO_MORE = Recovered(why="low")
TOO_SOON = Looked(enough=True, now_ms=130_000)
STARTED, LOST = triggers.Started(), triggers.Lost(now_ms=200_000, retry=RETRY)


def ended(result: str) -> triggers.Ended:
    return triggers.Ended(result=result, now_ms=200_000, retry=RETRY)


ENDS = [ended(result) for result in ("promoted", "progress", "outdated", "deferred", "failed")]
EVENTS = [FELL, FELL_WITH_ANOTHER, IS_LOW, LOW_NO_MORE, ENOUGH, TOO_FEW, TOO_SOON, Recovered(), STARTED, LOST, *ENDS]
FALLEN = [Fallen(fall=fall) for fall in (LOW_WAITING, FALL, WAITING)]
STATES: list[triggers.State] = [Ok(), *FALLEN, *(Due(fall=fall) for fall in (LOW, FALL))]
STATES += [Running(fall=fall) for fall in (LOW, FALL, WAITING)]
LOW_YET = {"draft": 4, "promised": 1.6, "served": 1.2}
LOW_AGAIN = LOW.model_copy(update={"wait_from_ms": 200_000, "wait_s": 60.0})
AT_ONCE = WAITING.model_copy(update={"wait_s": 0.0})
# What is not here stays as it is.
TABLE: list[tuple[triggers.State, triggers.Event, triggers.State]] = [
    (Ok(), FELL, Fallen(fall=FALL.model_copy(update={"served": 1.0, "since_ms": 200_000}))),
    (Ok(), FELL_WITH_ANOTHER, Fallen(fall=OTHER)),
    (Fallen(fall=FALL), FELL_WITH_ANOTHER, Fallen(fall=OTHER)),
    (Fallen(fall=FALL), ENOUGH, Due(fall=FALL)),
    (Fallen(fall=FALL), TOO_SOON, Due(fall=FALL)),
    (Fallen(fall=FALL), Recovered(), Ok()),
    (Fallen(fall=FALL), STARTED, Running(fall=FALL)),
    (Fallen(fall=WAITING), FELL_WITH_ANOTHER, Fallen(fall=OTHER)),
    (Fallen(fall=WAITING), ENOUGH, Due(fall=WAITING)),
    (Fallen(fall=WAITING), Recovered(), Ok()),
    (Fallen(fall=WAITING), STARTED, Running(fall=WAITING)),
    (Due(fall=FALL), FELL_WITH_ANOTHER, Fallen(fall=OTHER)),
    (Due(fall=FALL), TOO_FEW, Fallen(fall=FALL)),
    (Due(fall=FALL), Recovered(), Ok()),
    (Due(fall=FALL), STARTED, Running(fall=FALL)),
    (Running(fall=FALL), LOST, Fallen(fall=AGAIN.model_copy(update={"attempts": 1}))),
    (Running(fall=FALL), ended("promoted"), Ok()),
    (Running(fall=FALL), ended("progress"), Fallen(fall=FALL)),
    (Running(fall=FALL), ended("outdated"), Fallen(fall=FALL)),
    (Running(fall=FALL), ended("deferred"), Fallen(fall=AGAIN)),
    (Running(fall=FALL), ended("failed"), Fallen(fall=AGAIN.model_copy(update={"attempts": 1}))),
    (Running(fall=WAITING), LOST, Fallen(fall=TWICE)),
    (Running(fall=WAITING), ended("promoted"), Ok()),
    (Running(fall=WAITING), ended("progress"), Fallen(fall=AT_ONCE)),
    (Running(fall=WAITING), ended("outdated"), Fallen(fall=AT_ONCE)),
    (Running(fall=WAITING), ended("deferred"), Fallen(fall=AGAIN.model_copy(update={"attempts": 1}))),
    (Running(fall=WAITING), ended("failed"), Fallen(fall=TWICE)),
    (Fallen(fall=FALL), IS_LOW, Fallen(fall=LOW.model_copy(update=LOW_YET))),
    (Fallen(fall=WAITING), IS_LOW, Fallen(fall=LOW_WAITING.model_copy(update=LOW_YET))),
    (Due(fall=FALL), IS_LOW, Due(fall=LOW.model_copy(update=LOW_YET))),
    # What is low stays so with another draft, and no refresh but one that helped ends it.
    (Ok(), IS_LOW, Fallen(fall=LOW.model_copy(update={**LOW_YET, "since_ms": 200_000, "attempts": 2}))),
    (Fallen(fall=LOW_WAITING), IS_LOW, Fallen(fall=LOW_WAITING.model_copy(update=LOW_YET))),
    (Fallen(fall=LOW_WAITING), LOW_NO_MORE, Ok()),
    (Fallen(fall=LOW_WAITING), ENOUGH, Due(fall=LOW_WAITING)),
    (Fallen(fall=LOW_WAITING), TOO_SOON, Fallen(fall=LOW_WAITING)),
    (Fallen(fall=LOW_WAITING), STARTED, Running(fall=LOW_WAITING)),
    (Due(fall=LOW), IS_LOW, Due(fall=LOW.model_copy(update=LOW_YET))),
    (Due(fall=LOW), LOW_NO_MORE, Ok()),
    (Due(fall=LOW), TOO_FEW, Fallen(fall=LOW)),
    (Due(fall=LOW), STARTED, Running(fall=LOW)),
    (Running(fall=LOW), LOST, Fallen(fall=LOW_AGAIN.model_copy(update={"attempts": 1}))),
    (Running(fall=LOW), ended("promoted"), Fallen(fall=LOW_AGAIN.model_copy(update={"attempts": 1}))),
    (Running(fall=LOW), ended("progress"), Fallen(fall=LOW)),
    (Running(fall=LOW), ended("outdated"), Fallen(fall=LOW)),
    (Running(fall=LOW), ended("deferred"), Fallen(fall=LOW_AGAIN)),
    (Running(fall=LOW), ended("failed"), Fallen(fall=LOW_AGAIN.model_copy(update={"attempts": 1}))),
]


def test_each_event_does_to_each_state_what_the_table_says() -> None:
    for state, event in product(STATES, EVENTS):
        (wanted,) = [after for before, what, after in TABLE if (before, what) == (state, event)] or [state]
        assert triggers.step(state, event) == wanted, (state, event)


def test_a_state_survives_the_trip_through_json() -> None:
    assert [triggers.STATE.validate_json(state.model_dump_json()) for state in STATES] == STATES


def test_waits_double_up_to_the_longest() -> None:
    assert [RETRY.after(attempts) for attempts in (1, 2, 3, 4, 5, 10_000)] == [60, 120, 240, 480, 500, 500]


def test_a_run_that_was_put_off_does_not_shorten_a_longer_wait() -> None:
    long = FALL.model_copy(update={"attempts": 4, "wait_from_ms": 190_000, "wait_s": 480.0})
    assert triggers.step(Running(fall=long), ended("deferred")) == Fallen(fall=long)


@pytest.mark.parametrize("set_to_ms", [-(10**12), 0, 10**12])
def test_f24_a_clock_that_jumps_makes_no_wait_longer_than_the_longest(set_to_ms: int) -> None:
    state: triggers.State = Fallen(fall=WAITING)
    for second in range(0, int(RETRY.most_s) + 1, 10):
        state = triggers.step(state, Looked(enough=True, now_ms=set_to_ms + second * 1000))
    assert isinstance(state, Due)


def test_f24_a_clock_that_jumps_ahead_and_back_lets_the_wait_begin_anew_once() -> None:
    ahead = triggers.step(Running(fall=FALL), triggers.Ended(result="failed", now_ms=10**12, retry=RETRY))
    back = triggers.step(ahead, Looked(enough=True, now_ms=300_000))
    assert back == Fallen(fall=WAITING.model_copy(update={"wait_from_ms": 300_000}))
    assert triggers.step(back, Looked(enough=True, now_ms=359_000)) == back
    assert isinstance(triggers.step(back, Looked(enough=True, now_ms=360_000)), Due)
