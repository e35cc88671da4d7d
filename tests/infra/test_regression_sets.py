"""Regression sets: what is reserved, what leaves, and what one client can do to them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from infra import regression_sets
from infra.querylog import QueryLog
from infra.regression_sets import OTHER, RENEWED, SIZE, Change, Conversation, RegressionSet, plan, scored_as
from tests.infra.rows import content_of, erase, row

DAY_MS = 24 * 3600 * 1000
SECRET, ELSEWHERE = b"s" * 32, b"t" * 32
GROUP = "9" * 64


Group = Callable[[int], list[Conversation]]


def rows(number: int, domain: str = "code", keys: Sequence[str] = ("k",), day: int = 0, cluster: str = "") -> Group:
    """What makes so many rows, the first of which has the `seq` that it is given."""

    def made(seq: int) -> Conversation:
        return Conversation(seq, domain, keys[seq % len(keys)], day * DAY_MS, cluster or f"c{seq}", alike=f"c{seq}")

    return lambda first: [made(seq) for seq in range(first, first + number)]


def draw(cluster: str) -> bytes:
    return hashlib.sha256(cluster.encode()).digest()


class Sets:
    """The sets over windows: what `plan` does to them when each window brings the rows that are added."""

    def __init__(self, *groups: Group) -> None:
        self.log: list[Conversation] = []
        self.members: set[int] = set()
        if groups:
            self.add(*groups)

    def add(self, *groups: Group, trained: Iterable[str] = ()) -> Change:
        first = len(self.log) + 1
        for group in groups:
            self.log += group(len(self.log) + 1)
        change = plan(self.log, self.members, first, {*range(first, len(self.log) + 1)}, set(trained), draw)
        self.members = self.members - set(change.released) | set(change.reserved)
        return change

    def by(self, field: str, domain: str = "code") -> Counter[str]:
        inside = [one for one in self.log if one.seq in self.members and one.domain == domain]
        return Counter(getattr(one, field) for one in inside)


def test_a_set_takes_a_quarter_of_the_rows_until_it_has_a_hundred() -> None:
    sets, sizes = Sets(), []
    for _ in range(4):
        sets.add(rows(160))
        sizes.append(len(sets.members))
    assert sizes == [40, 80, SIZE, SIZE]
    assert set(sets.by("cluster").values()) == {1}


def test_a_quarter_is_of_the_rows_that_could_be_trained_on_however_many_a_key_asked() -> None:
    change = plan(rows(340)(1), (), 1, range(1, 61), set(), draw)
    assert len(change.reserved) == 15
    assert set(change.reserved) <= set(range(1, 61))


def test_a_full_set_is_renewed_by_two_a_window_and_its_oldest_leave() -> None:
    sets = Sets(rows(400))
    first = set(sets.members)
    assert len(first) == SIZE
    change = sets.add(rows(400))
    assert (len(change.reserved), len(change.released)) == (RENEWED, RENEWED)
    assert change.released == sorted(first)[:RENEWED]
    for _ in range(2, 26):
        sets.add(rows(400))
    assert len(sets.members) == SIZE
    assert len(first & sets.members) == SIZE // 2


def test_a_window_that_is_tried_again_reserves_nothing_more() -> None:
    sets = Sets(rows(400))
    assert plan(sets.log, sets.members, 1, set(range(1, 401)), set(), draw) == Change([], [])


def test_what_was_trained_on_or_can_not_be_scored_is_never_reserved() -> None:
    sets = Sets(rows(2, cluster="old"))
    sets.members.clear()
    sets.add(rows(100), rows(1, cluster="old"), trained={f"c{seq}" for seq in range(3, 90)})
    assert sets.members
    assert min(sets.members) >= 90
    assert 103 not in sets.members
    assert set(plan(rows(100)(1), set(), 1, {5, 6, 7}, set(), draw).reserved) <= {5, 6, 7}


def test_a_cluster_above_a_twentieth_of_its_domain_is_never_reserved() -> None:
    sets = Sets(rows(194), rows(11, cluster="large"), rows(10, cluster="just"))
    assert "large" not in sets.by("cluster")
    assert not Sets(rows(200, cluster="all")).members


def test_a_large_cluster_counts_with_all_its_rows_and_gives_one_conversation() -> None:
    sets = Sets(*(rows(5, cluster=f"of five {number}") for number in range(40)))
    assert len(sets.members) == 200 // 4 // 5
    assert set(sets.by("cluster").values()) == {1}


def test_keys_fill_a_set_in_turn_and_one_alone_fills_it_only_while_nobody_else_asks() -> None:
    sets = Sets(rows(380, keys=["flooder"]), rows(20, keys=["one", "two"]))
    assert sets.by("key") == {"flooder": SIZE - 20, "one": 10, "two": 10}
    alone = Sets(rows(400, keys=["flooder"]))
    for _ in range(1, 26):
        alone.add(rows(300, keys=["flooder"]), rows(100, keys=["one"]))
    assert alone.by("key") == {"flooder": 50, "one": 50}


def test_small_domains_share_one_set_and_a_stray_request_gets_none() -> None:
    sets = Sets(*(rows(40, domain=f"small-{number}") for number in range(5)))
    assert len(sets.members) == 50
    domains = [one.domain for one in sets.log if one.seq in sets.members]
    assert set(scored_as(domains).values()) == {OTHER}
    assert scored_as(["code"] * regression_sets.FEWEST + ["chat"]) == {"code": "code", "chat": OTHER}
    assert not Sets(rows(3, domain="stray"), rows(100)).by("seq", "stray")


def test_an_idle_domain_keeps_its_set_and_a_silent_one_is_given_up() -> None:
    sets = Sets(rows(200), rows(200, domain="chat"))
    idle = sets.by("seq")
    sets.add(rows(200, domain="chat", day=29))
    assert sets.by("seq") == idle
    sets.add(rows(200, domain="chat", day=regression_sets.SILENT_MS // DAY_MS + 1))
    assert (len(sets.by("seq")), len(sets.by("seq", "chat"))) == (0, SIZE)


def test_a_clock_that_jumps_for_a_row_gives_nothing_up() -> None:
    sets = Sets(rows(200))
    sets.add(rows(1, domain="chat", day=36500), rows(3, domain="chat"))
    assert len(sets.by("seq")) == 50


def test_nobody_stops_the_training_with_copies_of_what_is_reserved() -> None:
    sets = Sets(rows(400))
    known = [f"c{seq}" for seq in sorted(sets.members)]
    sets.add(rows(100, cluster=known[0]))
    assert known[0] not in sets.by("cluster")
    for cluster in known[1:]:
        sets.add(rows(9, cluster=cluster))
    alike = sum(one.cluster in sets.by("cluster") for one in sets.log) - len(sets.members)
    assert 0 < alike <= 0.25 * len(sets.log)


def test_copies_under_another_domain_take_nothing_from_a_set() -> None:
    sets = Sets(rows(400))
    first = set(sets.members)
    sets.add(rows(50, domain="other-domain", cluster=f"c{min(first)}"))
    assert sets.members == first


@pytest.fixture
def four(log: QueryLog) -> QueryLog:
    log.append([row(f"a{number}", subject=f"s{number}") for number in range(4)])
    return log


def test_members_are_rows_that_are_never_replayed_and_are_erased_and_the_report_says_so(four: QueryLog) -> None:
    sets = four.regression_sets
    sets.apply(Change([1, 2, 3, 99], []))
    assert sets.members() == [1, 2, 3]
    assert [found.seq for found in four.replay(9, before_seq=9)] == [4]
    assert erase(four, "s1").regression_rows == {"chat": 1}
    assert sets.members() == [1, 3]
    assert erase(four, older_than_ms=1).regression_rows == {"chat": 1}  # a0, whose time is 0
    assert erase(four, "s3").regression_rows == {}
    sets.apply(Change([], [3]))
    assert sets.members() == []


def test_of_each_set_it_is_known_since_when_it_waits_for_its_next_conversation(four: QueryLog) -> None:
    four.append([row("b7", "code"), row("b9", "code")])  # served at times 7 and 9
    sets = four.regression_sets
    assert sets.by_domain() == {}
    sets.apply(Change([1, 3, 5], []))
    assert sets.by_domain() == {"chat": RegressionSet(2, 2), "code": RegressionSet(1, 7)}


@pytest.fixture
def sketched(log: QueryLog) -> QueryLog:
    rows = [row(f"a{number}", subject=f"s{number}") for number in range(3)]
    added = [{"prompt_ids": [0, 7], "group": GROUP}, {"prompt_ids": [1, 7]}, {"prompt_ids": [2, 7]}]
    log.append([one.model_copy(update=change) for one, change in zip(rows, added, strict=True)])
    log.append([row("b1"), row("b2", consent="metadata")])  # neither has tokens
    return log


def test_each_row_with_tokens_is_sketched_once(sketched: QueryLog) -> None:
    sketches = sketched.sketches
    assert sketches.missing(SECRET) == [(1, [0, 7]), (2, [1, 7]), (3, [2, 7])]
    sketches.keep(SECRET, [(1, b"turn", b"grams"), (3, b"other", b"")])
    assert [seq for seq, _ in sketches.missing(SECRET)] == [2]
    assert [(one.seq, one.domain, one.group, one.turn, one.grams) for one in sketches.read(SECRET)] == [
        (1, "chat", GROUP, b"turn", b"grams"),
        (3, "chat", None, b"other", b""),
    ]


def test_under_another_secret_all_are_made_anew(sketched: QueryLog) -> None:
    sketches = sketched.sketches
    sketches.keep(SECRET, [(1, b"turn", b"grams")])
    assert [seq for seq, _ in sketches.missing(ELSEWHERE)] == [1, 2, 3]
    assert sketches.read(ELSEWHERE) == []
    sketches.keep(ELSEWHERE, [(1, b"new", b"")])
    assert (sketches.read(SECRET), sketches.read(ELSEWHERE)[0].turn) == ([], b"new")


def test_a_sketch_goes_with_its_row_and_none_is_made_of_an_erased_one(sketched: QueryLog) -> None:
    sketches = sketched.sketches
    sketches.keep(SECRET, [(1, b"a secret turn", b"grams"), (2, b"turn", b"grams")])
    assert erase(sketched, "s0").rows == 1
    sketches.keep(SECRET, [(1, b"a secret turn", b"grams")])
    assert [one.seq for one in sketches.read(SECRET)] == [2]
    erase(sketched, "s0")
    left = content_of(sketched)
    assert b"a secret turn" not in left
    assert GROUP.encode() not in left
