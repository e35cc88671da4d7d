"""Sides of a window: what a client says belongs together is on one, whatever the home's secret."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from infra.consent import group_of
from infra.querylog import QueryLog
from infra.regression_sets import Conversation, plan
from infra.windows import Window
from models.chats import ChatEncoder
from models.core.learning.hidden import Sample
from models.sources import Prompt
from models.sources.stdlib_code import Params, prompts
from tasks.stages.split import MOST_OF_GROUP, cluster_log, counted, drawn_by, held_out_by, stands_for, unseen_and_large
from tests.infra.rows import row

NUM_MODULES, PER_MODULE = 20, 5
HELD_OUT_FRACTION = 0.25


class Asked(NamedTuple):
    """A query log of functions of the standard library, the module of each row, and the target's directory."""

    log: Path
    modules: dict[int, str]
    target: Path

    def sides(self, secret: bytes) -> dict[str, set[str]]:
        """Return, for each module, the sides that its functions are on in a window of the whole log."""
        rows = cluster_log(self.log, secret, self.target, [], len(self.modules)).rows
        window = Window(first_seq=1, last_seq=len(rows), num_rows=len(rows), sha256="", owner="")
        change = plan(rows, (), 1, self.modules.keys(), (), drawn_by(secret))
        reserved = {one.cluster for one in rows if one.seq in change.reserved}
        is_held_out = held_out_by(secret, rows, window, HELD_OUT_FRACTION, ())
        found: dict[str, set[str]] = {module: set() for module in self.modules.values()}
        for one in rows:
            side = "regression" if one.cluster in reserved else "held out" if is_held_out(one.cluster) else "train"
            found[self.modules[one.seq]].add(side)
        return found


@pytest.fixture(scope="module")
def asked(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Asked]:
    tokenizer, folder = AutoTokenizer.from_pretrained(tiny_target), tmp_path_factory.mktemp("split")
    mined = prompts(Params(max_chars=120))
    sizes = Counter(one.group for one in mined)
    large = [group for group, size in sizes.items() if size >= PER_MODULE][:NUM_MODULES]
    chosen = [one for group in large for one in [one for one in mined if one.group == group][:PER_MODULE]]

    def make(grouped: bool) -> Asked:
        def logged(number: int, prompt: Prompt) -> object:
            ids = prompt.encode(ChatEncoder.of(tokenizer))
            group = group_of(bytes(32), "a key", prompt.group) if grouped else None
            return row(f"a{number}", "code").model_copy(update={"prompt_ids": ids, "group": group})

        log = QueryLog(folder / f"{'grouped' if grouped else 'alone'}.db")
        log.append([logged(number, prompt) for number, prompt in enumerate(chosen)])
        log.close()
        return Asked(log.database.file, {seq: one.group for seq, one in enumerate(chosen, start=1)}, tiny_target)

    return make


@pytest.mark.slow
def test_functions_of_one_module_are_on_one_side_whatever_the_secret(asked: Callable[[bool], Asked]) -> None:
    grouped, seen = asked(True), Counter[str]()

    @given(secret=st.binary(min_size=32, max_size=32))
    def holds(secret: bytes) -> None:
        sides = grouped.sides(secret)
        assert {module: len(found) for module, found in sides.items() if len(found) > 1} == {}
        seen.update(side for found in sides.values() for side in found)

    holds()
    assert seen.keys() == {"train", "held out", "regression"}


def test_where_nobody_says_what_belongs_together_modules_straddle(asked: Callable[[bool], Asked]) -> None:
    straddling = sum(len(found) > 1 for found in asked(False).sides(bytes(32)).values())
    assert straddling > NUM_MODULES / 2


def test_of_a_group_a_few_rows_are_scored_for_all_and_of_copies_each_for_itself() -> None:
    copies = [Conversation(seq, "code", "k", 0, "copies", "copies") for seq in range(5)]
    grouped = [Conversation(seq, "code", "k", 0, "group", f"c{seq}") for seq in range(5, 25)]
    alone = [Conversation(seq, "code", "k", 0, f"c{seq}", f"c{seq}") for seq in range(25, 30)]
    tests, drawn = [*copies, *grouped, *alone], set()
    for number in range(50):
        found = counted(tests, {"code": 500}, drawn_by(bytes([number] * 32)))
        assert {found.pop(one.seq) for one in copies + alone} == {1.0}
        assert found.keys() <= {one.seq for one in grouped}
        assert [*found.values()] == [20 / MOST_OF_GROUP] * MOST_OF_GROUP
        drawn.update(found)
    assert len(drawn) == len(grouped)
    two = counted(grouped[:2], {"code": 500}, drawn_by(bytes(32)))
    assert two == {grouped[0].seq: 1.0, grouped[1].seq: 1.0}


@pytest.mark.parametrize(("of_domain", "most"), [(400, 20), (200, 10), (20, 5)])
@pytest.mark.parametrize("alike", ["copy", "c{}"])
def test_a_cluster_stands_for_a_twentieth_of_its_domain_at_most(of_domain: int, most: float, alike: str) -> None:
    large = [Conversation(seq, "code", "k", 0, "large", alike.format(seq)) for seq in range(30)]
    assert stands_for(30, of_domain) == most
    found = counted(large, {"code": of_domain}, drawn_by(bytes(32)))
    assert sum(found.values()) == pytest.approx(most)
    assert len(found) == (30 if alike == "copy" else MOST_OF_GROUP)


def test_a_group_of_two_domains_stands_for_the_requests_of_each() -> None:
    both = [Conversation(seq, "code" if seq < 8 else "chat", "k", 0, "both", f"c{seq}") for seq in range(10)]
    found = counted(both, {"code": 200, "chat": 200}, drawn_by(bytes(32)))
    assert sorted(weight for seq, weight in found.items() if seq < 8) == [2.0] * MOST_OF_GROUP
    assert sorted(weight for seq, weight in found.items() if seq >= 8) == [1.0, 1.0]


@pytest.mark.parametrize("wording", ["", "c{}"], ids=["near copies", "a group of different ones"])
def test_what_is_too_large_for_a_probe_is_scored_in_its_first_window(wording: str) -> None:
    rows = [Conversation(seq, "code", "k", 0, f"c{seq}", f"c{seq}") for seq in range(90)]
    rows += [Conversation(seq, "code", "k", 0, "ten", wording.format(seq)) for seq in range(90, 100)]
    window = Window(first_seq=0, last_seq=99, num_rows=100, sha256="", owner="")
    for secret in (bytes(32), b"s" * 32):
        assert unseen_and_large(rows, window, (), drawn_by(secret)) == {"ten"}
        assert unseen_and_large(rows, window, {"ten"}, drawn_by(secret)) == set()
        assert held_out_by(secret, rows, window, 0.01, ())("ten")
    rows += [row._replace(seq=row.seq + 100) for row in rows]
    second = Window(first_seq=100, last_seq=199, num_rows=100, sha256="", owner="")
    assert unseen_and_large(rows, second, (), drawn_by(bytes(32))) == set()


def test_a_domain_of_nothing_but_large_groups_has_half_of_them_to_train_on_and_a_secret_draws_which() -> None:
    rows = [Conversation(seq, "code", "k", 0, f"g{seq // 10}", f"c{seq}") for seq in range(100)]
    rows += [Conversation(seq, "chat", "k", 0, f"c{seq}", f"c{seq}") for seq in range(100, 200)]
    rows += [Conversation(seq, "chat", "k", 0, "copies", "copies") for seq in range(200, 230)]
    window = Window(first_seq=0, last_seq=229, num_rows=230, sha256="", owner="")
    drawn = [unseen_and_large(rows, window, (), drawn_by(bytes([number] * 32))) for number in range(20)]
    assert all("copies" in large and len(large) == 6 for large in drawn)
    assert len(set().union(*drawn)) == 11
    assert unseen_and_large(rows[:10], window, (), drawn_by(bytes(32))) == {"g0"}


def test_what_the_first_samples_were_said_to_belong_to_is_one_cluster(asked: Callable[[bool], Asked]) -> None:
    grouped = asked(True)
    first = [Sample(f"s{n}", "chat", [n, n + 1, n + 2], [1, 2, 3], cluster="ab"[n % 2]) for n in range(6)]
    named = cluster_log(grouped.log, bytes(32), grouped.target, first, 0).first
    assert len(set(named.values())) == 2
    assert named["s0"] == named["s2"] == named["s4"]
    alone = cluster_log(grouped.log, bytes(32), grouped.target, [one._replace(cluster="") for one in first], 0).first
    assert len(set(alone.values())) == 6
