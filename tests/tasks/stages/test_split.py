"""Sides of a window: what a client says belongs together is on one, whatever the home's secret."""

import random
from collections import Counter
from pathlib import Path

import pytest

from infra.consent import group_of
from infra.querylog import QueryLog
from infra.regression_sets import Conversation, plan
from infra.windows import Window
from models.core.learning.hidden import Sample
from tasks.stages.split import MOST_OF_GROUP, cluster_log, counted, drawn_by, held_out_by, stands_for, unseen_and_large
from tests.infra.rows import row

PER_GROUP, NUM_GROUPS = 5, 20
HELD_OUT_FRACTION = 0.25


def words(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 250) for _ in range(30)]


@pytest.fixture
def log(home: Path) -> QueryLog:
    """A query log of different questions, of which some that follow each other belong together."""
    groups = [group_of(bytes(32), "a key", str(number // PER_GROUP)) for number in range(PER_GROUP * NUM_GROUPS)]
    log = QueryLog(home / "queries.db")
    said = ({"prompt_ids": words(number), "group": group} for number, group in enumerate(groups))
    log.append([row(f"a{number}", "code").model_copy(update=one) for number, one in enumerate(said)])
    return log


def sides(log: QueryLog, target: Path, secret: bytes, grouped: bool = True) -> list[set[str]]:
    """Return the sides that the rows of each group are on in a window of the whole log."""
    rows = cluster_log(log.database.file, secret, target, [], PER_GROUP * NUM_GROUPS).rows
    if not grouped:
        rows = [one._replace(cluster=one.alike) for one in rows]
    window = Window(first_seq=1, last_seq=len(rows), num_rows=len(rows), sha256="", owner="")
    change = plan(rows, (), 1, range(1, len(rows) + 1), (), drawn_by(secret))
    reserved = {one.cluster for one in rows if one.seq in change.reserved}
    is_held_out = held_out_by(secret, rows, window, HELD_OUT_FRACTION, ())
    found: list[set[str]] = [set() for _ in range(NUM_GROUPS)]
    for one in rows:
        side = "regression" if one.cluster in reserved else "held out" if is_held_out(one.cluster) else "train"
        found[(one.seq - 1) // PER_GROUP].add(side)
    return found


@pytest.mark.slow
def test_what_belongs_together_is_on_one_side_whatever_the_secret(log: QueryLog, tiny_target: Path) -> None:
    seen = Counter[str]()
    for number in range(8):
        found = sides(log, tiny_target, bytes([number] * 32))
        assert {len(of_group) for of_group in found} == {1}
        seen.update(side for of_group in found for side in of_group)
    assert seen.keys() == {"train", "held out", "regression"}


def test_where_nobody_says_what_belongs_together_it_straddles(log: QueryLog, tiny_target: Path) -> None:
    straddling = sum(len(of_group) > 1 for of_group in sides(log, tiny_target, bytes(32), grouped=False))
    assert straddling > NUM_GROUPS / 2


def rows_of(first: int, last: int, cluster: str, alike: str = "c{}", domain: str = "code") -> list[Conversation]:
    """Return rows of a cluster; `{}` in a name stands for the row's number."""
    numbers = range(first, last)
    return [Conversation(seq, domain, "k", 0, cluster.format(seq), alike.format(seq)) for seq in numbers]


def test_of_a_group_a_few_rows_are_scored_for_all_and_of_copies_each_for_itself() -> None:
    copies, grouped, alone = rows_of(0, 5, "copies", "copies"), rows_of(5, 25, "group"), rows_of(25, 30, "c{}")
    drawn = set()
    for number in range(50):
        found = counted([*copies, *grouped, *alone], {"code": 500}, drawn_by(bytes([number] * 32)))
        assert {found.pop(one.seq) for one in copies + alone} == {1.0}
        assert found.keys() <= {one.seq for one in grouped}
        assert [*found.values()] == [20 / MOST_OF_GROUP] * MOST_OF_GROUP
        drawn.update(found)
    assert len(drawn) == len(grouped)
    assert counted(grouped[:2], {"code": 500}, drawn_by(bytes(32))) == {5: 1.0, 6: 1.0}


@pytest.mark.parametrize(("of_domain", "most"), [(400, 20), (200, 10), (20, 5)])
@pytest.mark.parametrize("alike", ["copy", "c{}"])
def test_a_cluster_stands_for_a_twentieth_of_its_domain_at_most(of_domain: int, most: float, alike: str) -> None:
    assert stands_for(30, of_domain) == most
    found = counted(rows_of(0, 30, "large", alike), {"code": of_domain}, drawn_by(bytes(32)))
    assert sum(found.values()) == pytest.approx(most)
    assert len(found) == (30 if alike == "copy" else MOST_OF_GROUP)


def test_a_group_of_two_domains_stands_for_the_requests_of_each() -> None:
    both = rows_of(0, 8, "both") + rows_of(8, 10, "both", domain="chat")
    found = counted(both, {"code": 200, "chat": 200}, drawn_by(bytes(32)))
    assert sorted(weight for seq, weight in found.items() if seq < 8) == [2.0] * MOST_OF_GROUP
    assert sorted(weight for seq, weight in found.items() if seq >= 8) == [1.0, 1.0]


@pytest.mark.parametrize("wording", ["", "c{}"], ids=["near copies", "a group of different ones"])
def test_what_is_too_large_for_a_probe_is_scored_in_its_first_window(wording: str) -> None:
    rows = rows_of(0, 90, "c{}") + rows_of(90, 100, "ten", wording)
    window = Window(first_seq=0, last_seq=99, num_rows=100, sha256="", owner="")
    for secret in (bytes(32), b"s" * 32):
        assert unseen_and_large(rows, window, (), drawn_by(secret)) == {"ten"}
        assert unseen_and_large(rows, window, {"ten"}, drawn_by(secret)) == set()
        assert held_out_by(secret, rows, window, 0.01, ())("ten")
    rows += [row._replace(seq=row.seq + 100) for row in rows]
    second = Window(first_seq=100, last_seq=199, num_rows=100, sha256="", owner="")
    assert unseen_and_large(rows, second, (), drawn_by(bytes(32))) == set()


def test_a_domain_of_nothing_but_large_groups_has_half_of_them_to_train_on_and_a_secret_draws_which() -> None:
    rows = [one for first in range(0, 100, 10) for one in rows_of(first, first + 10, f"g{first // 10}")]
    rows += rows_of(100, 200, "c{}", domain="chat") + rows_of(200, 230, "copies", "copies", "chat")
    window = Window(first_seq=0, last_seq=229, num_rows=230, sha256="", owner="")
    drawn = [unseen_and_large(rows, window, (), drawn_by(bytes([number] * 32))) for number in range(20)]
    assert all("copies" in large and len(large) == 6 for large in drawn)
    assert len(set().union(*drawn)) == 11
    assert unseen_and_large(rows[:10], window, (), drawn_by(bytes(32))) == {"g0"}


def test_what_the_first_samples_were_said_to_belong_to_is_one_cluster(log: QueryLog, tiny_target: Path) -> None:
    first = [Sample(f"s{n}", "chat", [n, n + 1, n + 2], [1, 2, 3], cluster="ab"[n % 2]) for n in range(6)]
    named = cluster_log(log.database.file, bytes(32), tiny_target, first, 0).first
    assert len(set(named.values())) == 2
    assert named["s0"] == named["s2"] == named["s4"]
    alone = [one._replace(cluster="") for one in first]
    assert len(set(cluster_log(log.database.file, bytes(32), tiny_target, alone, 0).first.values())) == 6
