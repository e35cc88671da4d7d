"""Replicas that follow one registry together: real loops and engines, of which each says itself what it loaded."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.events import PAIR_BROKE
from infra.rollout_store import Member, RolloutStore, note_tested
from infra.status import Phase
from infra.versions import Version, label
from models.core.evaluation.golden import Golden
from models.engines.torch import Params
from models.types import RolloutParams
from services.drafts import DraftSource
from services.reconciler import Reconciler, ReplicaHooks
from tests.drills.spoiled import NAN
from tests.services.test_reconciler import FaultyEngine, World, goldens  # noqa: F401 - a fixture

PARAMS = RolloutParams(waves=(1.0,), pause_s=0)


class Replicas:
    """Replicas with names of one letter, whose engines `faults` spoil, by the letter and a draft's number."""

    def __init__(self, world: World) -> None:
        self.world, self.faults = world, dict[str, dict[str, str]]()
        self.loops: dict[str, Reconciler] = {}
        self.engines: dict[str, FaultyEngine] = {}
        self.taking_part: dict[str, ExitStack] = {}

    def start(self, names: str) -> list[int | None]:
        """Start replicas, one after the other, and return the drafts that they started with."""
        return [self._start(name) for name in names]

    def _start(self, name: str) -> int | None:
        world = self.world
        store = RolloutStore(world.home / "queries.db", "fleet", PARAMS)
        member = Member(store, world.registry, name, logged_as=name)
        world.source = DraftSource(
            world.registry, world.config.settings.cache, world.card, Params().num_draft_tokens, member
        )
        booted = world.boot()
        self.taking_part[name] = ExitStack()
        self.taking_part[name].enter_context(store.taking_part(name))
        self.loops[name], self.engines[name] = world.loop, world.engine
        return booted

    def stop(self, names: str) -> None:
        for name in names:
            self.taking_part.pop(name).close()
            del self.loops[name], self.engines[name]

    def tick(self, names: str = "", times: int = 2) -> None:
        for _ in range(times):
            for name in names or [*self.loops]:
                self.engines[name].faults = self.faults.get(name, {})
                self.world.runner.run(self.loops[name].tick())

    def serving(self) -> dict[str, int | None]:
        states = {name: loop.state.serving for name, loop in self.loops.items()}
        return {name: None if draft is None else draft.version.number for name, draft in states.items()}

    def swaps(self, names: str) -> list[int]:
        """Return how many drafts each replica loaded since its start, by its own count."""
        return [self.loops[name].counts["swaps"] for name in names]

    def passed(self, draft: Version) -> None:
        note_tested(self.world.home / "queries.db", draft, PARAMS)


@pytest.fixture
def replicas(
    store: Path,
    tiny_target: Path,
    goldens: list[Golden],  # noqa: F811
    tmp_path: Path,
) -> Iterator[Replicas]:
    """Three replicas that serve draft 1, which is good in all of them."""
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    world = World(tmp_path, tiny_target, goldens)
    world.push()
    with world.runner:
        replicas = Replicas(world)
        assert replicas.start("abc") == [1, 1, 1]
        replicas.tick()
        assert replicas.serving() == {"a": 1, "b": 1, "c": 1}
        yield replicas
        replicas.stop("".join(replicas.loops))


def spoil(replicas: Replicas, names: str, draft: Version, old: str = "") -> None:
    """Let a draft not compute what its file says, in some replicas; `old` is a fault of draft 1 there."""
    for name in names:
        replicas.faults[name] = {str(draft.number): "mangles", "1": old}


def test_a_champion_is_loaded_by_one_replica_until_it_passed_its_test_and_then_by_all(replicas: Replicas) -> None:
    draft = replicas.world.push()
    replicas.tick("bca")
    assert (replicas.swaps("abc"), replicas.serving()) == ([1, 0, 0], {"a": 2, "b": 1, "c": 1})
    replicas.passed(draft)
    replicas.tick()
    assert (replicas.swaps("abc"), replicas.serving()) == ([1, 1, 1], {"a": 2, "b": 2, "c": 2})


def test_a_draft_that_did_worse_on_the_canary_was_loaded_nowhere_else(replicas: Replicas) -> None:
    draft = replicas.world.push()
    replicas.tick()
    replicas.world.registry.revert("draft", draft.number, "worse on the same requests")
    replicas.tick()
    assert (replicas.swaps("abc"), replicas.serving()) == ([2, 0, 0], {"a": 1, "b": 1, "c": 1})


def test_a_bad_draft_is_quarantined_once_the_last_good_one_passed_again_and_no_other_replica_loaded_it(
    replicas: Replicas,
) -> None:
    draft = replicas.world.push()
    spoil(replicas, "abc", draft)
    replicas.tick("abc", times=1)
    assert (replicas.loops["a"].state.phase, replicas.world.is_quarantined(draft)) == (Phase.UNPROVEN, False)
    replicas.tick("bc")
    replicas.tick("a", times=1)
    why = replicas.world.registry.get("draft", draft.number).quarantined
    assert why.startswith("failed where the last good draft passed right after: ")
    replicas.tick()
    assert (replicas.swaps("abc"), replicas.serving()) == ([1, 0, 0], {"a": 1, "b": 1, "c": 1})
    assert all(loop.state.phase is Phase.SERVING for loop in replicas.loops.values())
    replicas.faults.clear()
    replicas.world.clear(draft)
    replicas.tick("abc")
    assert replicas.serving() == {"a": 2, "b": 1, "c": 1}


def test_a_canary_that_fails_its_last_good_draft_too_says_so_and_the_draft_reaches_all_others(
    replicas: Replicas,
) -> None:
    draft, told = replicas.world.push(), list[tuple[str, str]]()
    spoil(replicas, "a", draft, old="corrupts")
    replicas.loops["a"].hooks = ReplicaHooks(tell=lambda event, text: told.append((event, text)))
    replicas.tick("ab")
    assert replicas.serving() == {"a": None, "b": 2, "c": 1}
    replicas.passed(draft)
    replicas.tick()
    assert (replicas.swaps("abc"), replicas.serving()) == ([1, 1, 1], {"a": None, "b": 2, "c": 2})
    assert (replicas.world.champion(), replicas.world.is_quarantined(draft)) == (2, False)
    sick = replicas.loops["a"].state
    assert told == [(PAIR_BROKE, sick.fault)] and "draft 1 was proven here and fails after draft 2" in told[0][1]
    assert ([*sick.unreported], [*sick.memory.good]) == ([label(draft)], [replicas.world.registry.get("draft", 1)])


def test_a_replica_in_which_a_draft_fails_alone_in_a_wave_keeps_the_last_good_one_and_the_others_go_on(
    replicas: Replicas,
) -> None:
    draft = replicas.world.push()
    spoil(replicas, "b", draft)
    replicas.tick()
    replicas.passed(draft)
    replicas.tick(times=3)
    assert (replicas.swaps("abc"), replicas.serving()) == ([1, 1, 1], {"a": 2, "b": 1, "c": 2})
    assert (replicas.world.champion(), replicas.world.is_quarantined(draft)) == (2, False)
    assert replicas.loops["b"].state.controls == {label(draft): True}


def test_files_that_are_bad_are_checked_by_two_replicas_and_loaded_by_none(replicas: Replicas) -> None:
    draft = replicas.world.push(spoil=NAN)
    replicas.tick("a")
    assert not replicas.world.is_quarantined(draft)
    replicas.tick("bc")
    assert replicas.world.registry.get("draft", draft.number).quarantined.startswith("2 of 2 replicas failed: ")
    assert (replicas.swaps("abc"), replicas.serving()) == ([0, 0, 0], {"a": 1, "b": 1, "c": 1})


def test_an_operator_who_switches_speculation_off_leaves_the_fault_to_be_told_by_one_more_replica(
    replicas: Replicas,
) -> None:
    draft = replicas.world.push()
    spoil(replicas, "ab", draft)
    replicas.tick("a", times=1)
    replicas.world.runner.run(replicas.loops["a"].set_speculation(False))
    replicas.tick("ab", times=1)
    assert (replicas.swaps("ab"), replicas.world.is_quarantined(draft)) == ([1, 1], False)
    replicas.tick("b", times=1)
    assert replicas.world.is_quarantined(draft)


def test_a_replica_that_starts_meanwhile_serves_the_last_good_draft_and_a_later_one_the_new(
    replicas: Replicas,
) -> None:
    draft = replicas.world.push()
    replicas.tick()
    assert replicas.start("d") == [1]
    replicas.passed(draft)
    replicas.tick()
    assert (replicas.serving()["d"], replicas.start("e")) == (2, [2])


def test_a_draft_of_another_shape_waits_for_a_start_of_all_replicas(replicas: Replicas) -> None:
    draft = replicas.world.push(vocab_size=32)
    replicas.tick()
    assert replicas.serving() == {"a": 1, "b": 1, "c": 1}
    [told] = [loop.state.unfit for loop in replicas.loops.values() if loop.state.unfit]
    assert "the next start of all replicas serves it" in told[label(draft)]
    assert all(loop.state.replacement is None for loop in replicas.loops.values())
    replicas.stop("abc")
    assert replicas.start("def") == [2, 2, 2]
    replicas.tick()
    assert replicas.serving() == {"d": 2, "e": 2, "f": 2}
