"""Regression sets: what is reserved, what leaves, and what one client can do to them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from infra.querylog import QueryLog
from infra.regression_sets import (
    FEWEST,
    OTHER,
    RENEWED,
    SILENT_MS,
    SIZE,
    Change,
    Conversation,
    RegressionSet,
    plan,
    scored_as,
)
from tests.infra.rows import erase, row

DAY_MS = 24 * 3600 * 1000


def rows(
    number: int, start: int = 1, domain: str = "code", keys: Iterable[str] = ("k",), day: int = 0, cluster: str = ""
) -> list[Conversation]:
    keys = list(keys)
    return [
        Conversation(seq, domain, keys[seq % len(keys)], day * DAY_MS, cluster or f"c{seq}", alike=f"c{seq}")
        for seq in range(start, start + number)
    ]


def draw(cluster: str) -> bytes:
    return hashlib.sha256(cluster.encode()).digest()


class Sets:
    """The sets over windows: what `plan` does to them when each window brings the rows that are added."""

    def __init__(self) -> None:
        self.log: list[Conversation] = []
        self.members: set[int] = set()

    def add(self, *groups: list[Conversation], trained: Iterable[str] = ()) -> Change:
        new = [one for group in groups for one in group]
        self.log += new
        seqs = {one.seq for one in new}
        change = plan(self.log, self.members, min(seqs), seqs, set(trained), draw)
        self.members = self.members - set(change.released) | set(change.reserved)
        return change

    def by(self, field: str, domain: str = "code") -> Counter[str]:
        inside = [one for one in self.log if one.seq in self.members and one.domain == domain]
        return Counter(getattr(one, field) for one in inside)


def test_a_set_takes_a_quarter_of_the_rows_until_it_has_a_hundred() -> None:
    sets, sizes = Sets(), []
    for window in range(4):
        sets.add(rows(160, start=1 + 160 * window))
        sizes.append(len(sets.members))
    assert sizes == [40, 80, SIZE, SIZE]
    assert set(sets.by("cluster").values()) == {1}


def test_a_quarter_is_of_the_rows_that_could_be_trained_on_however_many_a_key_asked() -> None:
    flood = rows(340)
    change = plan(flood, (), 1, range(1, 61), set(), draw)
    assert len(change.reserved) == 15
    assert set(change.reserved) <= set(range(1, 61))


def test_a_full_set_is_renewed_by_two_a_window_and_its_oldest_leave() -> None:
    sets = Sets()
    sets.add(rows(400))
    first = set(sets.members)
    assert len(first) == SIZE
    change = sets.add(rows(400, start=401))
    assert (len(change.reserved), len(change.released)) == (RENEWED, RENEWED)
    assert change.released == sorted(first)[:RENEWED]
    for window in range(2, 26):
        sets.add(rows(400, start=1 + 400 * window))
    assert len(sets.members) == SIZE
    assert len(first & sets.members) == SIZE // 2


def test_a_window_that_is_tried_again_reserves_nothing_more() -> None:
    sets = Sets()
    sets.add(rows(400))
    seqs = set(range(1, 401))
    assert plan(sets.log, sets.members, 1, seqs, set(), draw) == Change([], [])


def test_what_was_trained_on_or_can_not_be_scored_is_never_reserved() -> None:
    sets = Sets()
    sets.add(rows(2, cluster="old"))
    sets.members.clear()
    sets.add(rows(100, start=3), rows(1, start=103, cluster="old"), trained={f"c{seq}" for seq in range(3, 90)})
    assert sets.members
    assert min(sets.members) >= 90
    assert 103 not in sets.members
    log = rows(100)
    assert set(plan(log, set(), 1, {5, 6, 7}, set(), draw).reserved) <= {5, 6, 7}


def test_a_cluster_above_a_twentieth_of_its_domain_is_never_reserved() -> None:
    sets = Sets()
    sets.add(rows(194), rows(11, start=195, cluster="large"), rows(10, start=206, cluster="just"))
    assert "large" not in sets.by("cluster")
    only_one = Sets()
    only_one.add(rows(200, cluster="all"))
    assert not only_one.members


def test_a_large_cluster_counts_with_all_its_rows_and_gives_one_conversation() -> None:
    sets = Sets()
    for start in range(1, 201, 5):
        sets.log += rows(5, start=start, cluster=f"of five {start}")
    seqs = set(range(1, 201))
    sets.members = set(plan(sets.log, set(), 1, seqs, set(), draw).reserved)
    assert len(sets.members) == 200 // 4 // 5
    assert set(sets.by("cluster").values()) == {1}


def test_keys_fill_a_set_in_turn_and_one_alone_fills_it_only_while_nobody_else_asks() -> None:
    sets = Sets()
    sets.add(rows(380, keys=["flooder"]), rows(20, start=381, keys=["one", "two"]))
    assert sets.by("key") == {"flooder": SIZE - 20, "one": 10, "two": 10}
    alone = Sets()
    alone.add(rows(400, keys=["flooder"]))
    for window in range(1, 26):
        alone.add(rows(300, 1 + 400 * window, keys=["flooder"]), rows(100, 301 + 400 * window, keys=["one"]))
    assert alone.by("key") == {"flooder": 50, "one": 50}


def test_small_domains_share_one_set_and_a_stray_request_gets_none() -> None:
    sets = Sets()
    sets.add(*(rows(40, start=1 + 40 * number, domain=f"small-{number}") for number in range(5)))
    assert len(sets.members) == 50
    domains = [one.domain for one in sets.log if one.seq in sets.members]
    assert set(scored_as(domains).values()) == {OTHER}
    assert scored_as(["code"] * FEWEST + ["chat"]) == {"code": "code", "chat": OTHER}
    stray = Sets()
    stray.add(rows(3, domain="stray"), rows(100, start=4))
    assert "stray" not in {one.domain for one in stray.log if one.seq in stray.members}


def test_an_idle_domain_keeps_its_set_and_a_silent_one_is_given_up() -> None:
    sets = Sets()
    sets.add(rows(200), rows(200, start=201, domain="chat"))
    idle = sets.by("seq")
    sets.add(rows(200, start=401, domain="chat", day=29))
    assert sets.by("seq") == idle
    sets.add(rows(200, start=601, domain="chat", day=SILENT_MS // DAY_MS + 1))
    assert (len(sets.by("seq")), len(sets.by("seq", "chat"))) == (0, SIZE)


def test_a_clock_that_jumps_for_a_row_gives_nothing_up() -> None:
    sets = Sets()
    sets.add(rows(200))
    sets.add(rows(1, start=201, domain="chat", day=36500), rows(3, start=202, domain="chat"))
    assert len(sets.by("seq")) == 50


def test_nobody_stops_the_training_with_copies_of_what_is_reserved() -> None:
    sets = Sets()
    sets.add(rows(400))
    known = [f"c{seq}" for seq in sorted(sets.members)]
    sets.add(rows(100, start=401, cluster=known[0]))
    assert known[0] not in sets.by("cluster")
    for number, cluster in enumerate(known[1:]):
        sets.add(rows(9, start=501 + 9 * number, cluster=cluster))
    alike = sum(one.cluster in sets.by("cluster") for one in sets.log) - len(sets.members)
    assert 0 < alike <= 0.25 * len(sets.log)


def test_copies_under_another_domain_take_nothing_from_a_set() -> None:
    sets = Sets()
    sets.add(rows(400))
    first = set(sets.members)
    cluster = f"c{min(first)}"
    sets.add(rows(50, start=401, domain="other-domain", cluster=cluster))
    assert sets.members == first


@pytest.fixture
def log(place: Path | str) -> Iterator[QueryLog]:
    log = QueryLog(place)
    log.append([row(f"a{number}", subject=f"s{number}") for number in range(4)])
    yield log
    log.close()


def test_members_are_rows_that_are_never_replayed_and_are_erased_and_the_report_says_so(log: QueryLog) -> None:
    sets = log.regression_sets
    sets.apply(Change([1, 2, 3, 99], []))
    assert sets.members() == [1, 2, 3]
    assert [found.seq for found in log.replay(9, before_seq=9)] == [4]
    assert erase(log, "s1").regression_rows == {"chat": 1}
    assert sets.members() == [1, 3]
    assert erase(log, older_than_ms=1).regression_rows == {"chat": 1}  # a0, whose time is 0
    assert erase(log, "s3").regression_rows == {}
    sets.apply(Change([], [3]))
    assert sets.members() == []


def test_of_each_set_it_is_known_since_when_it_waits_for_its_next_conversation(log: QueryLog) -> None:
    log.append([row("b7", "code"), row("b9", "code")])  # served at times 7 and 9
    sets = log.regression_sets
    assert sets.by_domain() == {}
    sets.apply(Change([1, 3, 5], []))
    assert sets.by_domain() == {"chat": RegressionSet(2, 2), "code": RegressionSet(1, 7)}
