"""Shares of API keys: how much of a refresh one can be, and how long it waits for the others."""

import random
from collections.abc import Sequence

import pytest

from infra.consent import QueryRow
from infra.querylog import QueryLog
from infra.trigger_store import now_ms
from models.recipe import Refresh
from tasks.claim_window import advance_cursor, claim_window
from tasks.stages.samples import usable
from tasks.stages.split import ForOthers, cap_per_key, rows_of_others
from tests.infra.rows import erase, row

REFRESH = Refresh(min_rows=60, max_rows=200, share_wait_s=900)
WAIT_MS = 900_000
KEYS = {"flooder": "f" * 64, "other": "a" * 64, "third": "b" * 64, "nobody": None}


def asked(log: QueryLog, at_ms: int, **numbers: int) -> None:
    """Append so many rows of each key, which are answered with different tokens."""
    first = len(log.ids())
    names = [name for name, number in numbers.items() for _ in range(number)]
    log.append([_row(first + place, name, at_ms) for place, name in enumerate(names)])


def _row(number: int, name: str, at_ms: int) -> QueryRow:
    said = {"key": KEYS[name], "time_ms": at_ms, "prompt_ids": [1, 2], "completion_ids": [number, number + 1, 4]}
    return row(f"a{number}", "code", subject=name).model_copy(update=said | {"sampling": {"temperature": 0}})


def kept_of(rows: Sequence[QueryRow], key: str) -> list[int]:
    """Return how many rows a refresh keeps, and how many of them are a key's."""
    samples, _ = usable(rows, 1, REFRESH.max_share_per_key, REFRESH.min_rows)
    keys = {one.id: one.key for one in rows}
    return [len(samples), sum(keys[one.id] == KEYS[key] for one in samples)]


def test_while_others_may_ask_a_flood_waits_for_their_rows_and_is_then_within_its_share(log: QueryLog) -> None:
    asked(log, now_ms(), flooder=100, other=1)
    assert claim_window.fn(REFRESH) is None
    asked(log, now_ms(), other=20, nobody=20)
    window = claim_window.fn(REFRESH)
    kept, of_flooder = kept_of(log.rows(window.first_seq, window.last_seq), "flooder")
    assert (kept, of_flooder) == (82, 41)


def test_whoever_asks_once_stops_nobody_for_longer_than_the_wait(log: QueryLog) -> None:
    asked(log, now_ms() - WAIT_MS, flooder=100, other=1)
    window = claim_window.fn(REFRESH)
    assert kept_of(log.rows(window.first_seq, window.last_seq), "flooder") == [60, 59]
    advance_cursor.fn(window)
    asked(log, now_ms(), flooder=100, other=1)  # the next one waits anew
    assert claim_window.fn(REFRESH) is None


def test_a_window_that_was_opened_goes_on_whatever_becomes_of_its_keys(log: QueryLog) -> None:
    asked(log, now_ms(), flooder=70, other=40, third=1)
    window = claim_window.fn(REFRESH)
    erase(log, "other")
    assert rows_of_others(log, REFRESH, now_ms()) is not None
    again = claim_window.fn(REFRESH)
    assert window is not None and again is not None
    assert (again.first_seq, again.last_seq, again.num_rows) == (1, window.last_seq, 71)


@pytest.mark.parametrize(
    ("numbers", "within"),
    [
        ({"flooder": 100, "other": 1}, 2),
        ({"flooder": 100, "nobody": 10}, 20),
        ({"flooder": 100, "other": 10, "third": 10}, 40),
        ({"flooder": 100}, None),
        ({"flooder": 50, "other": 9}, None),  # too few, whoever asked
        ({"flooder": 50, "other": 10}, 20),
        ({"flooder": 100, "other": 30}, None),
    ],
)
def test_it_waits_where_too_few_rows_are_within_the_share_and_two_keys_ask(
    log: QueryLog, numbers: dict[str, int], within: int | None
) -> None:
    asked(log, 1000, **numbers)
    waits = None if within is None else ForOthers(within, 1000 + WAIT_MS)
    assert rows_of_others(log, REFRESH, 1000) == waits
    assert rows_of_others(log, REFRESH, 999 + WAIT_MS) == waits
    assert rows_of_others(log, REFRESH, 1000 + WAIT_MS) is None
    assert rows_of_others(log, REFRESH, 999) is None  # the clock was set back
    assert rows_of_others(log, REFRESH.model_copy(update={"share_wait_s": 0.0}), 1000) is None


def test_only_rows_that_wait_and_may_be_trained_on_count(log: QueryLog) -> None:
    asked(log, 5, flooder=70, other=70)
    window = log.windows.claim("a run", 200)
    log.windows.commit(window)
    asked(log, 7, flooder=100)
    log.append([row("m6", "code", "metadata").model_copy(update={"key": KEYS["other"]})])
    assert log.waiting_keys(200) == ({KEYS["flooder"]: 100}, 7)
    assert log.waiting_keys(10) == ({KEYS["flooder"]: 10}, 7)
    assert rows_of_others(log, REFRESH, 8) is None


@pytest.mark.parametrize(
    ("sizes", "max_share", "cap"),
    [
        ((500, 100), 0.5, 100),
        ((600, 50, 40, 30), 0.5, 120),
        ((600, 300, 100), 0.4, 200),  # 200 of 500
        ((600, 300, 100), 0.1, 100),  # equal parts
        ((600,), 0.1, 600),
    ],
)
def test_the_cap_is_the_largest_that_keeps_each_key_within_its_share_of_what_is_kept(sizes, max_share, cap):
    assert cap_per_key(sizes, max_share) == cap


def test_no_larger_cap_would_keep_the_share():
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.randint(1, 60) for _ in range(rng.randint(2, 8))]
        share = rng.choice([0.125, 0.25, 0.5, 0.75])
        wanted = max(share, 1 / len(sizes))
        allowed = [cap for cap in range(1, max(sizes) + 1) if cap <= wanted * sum(min(n, cap) for n in sizes) + 1e-9]
        assert cap_per_key(sizes, share) == max(allowed), (sizes, share)


@pytest.mark.parametrize("sizes", [(600, 1), (600, 600, 1), (600, 89, 1)])
def test_a_key_with_one_row_starves_no_refresh_and_lets_a_flood_fill_up_only_the_smallest(sizes):
    cap = cap_per_key(sizes, 0.4, min_rows=180)
    kept = sum(min(size, cap) for size in sizes)
    assert 180 <= kept < 180 + len(sizes)
    assert cap_per_key((100, 1), 0.5, min_rows=180) == 100
