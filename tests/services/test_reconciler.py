"""The loop's decisions against a real registry, real drafts and the reference engine, which starts in no time.

Where a fault can't be written into a file, the engine has it: `FaultyEngine` misbehaves while the versions named in
`faults` are loaded. The production engine is driven in test_service.py.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.manifest import write_manifest
from infra.registry import CHAMPION, LINEAGE_TAGS, ForeignVersion, Registry, Version
from infra.store import StoreUnavailable
from models.drafts import eagle3
from models.engines import Completion, Sampling
from models.engines.torch import Params, TorchEngine
from models.golden import Golden
from models.params import BaseParams
from models.targets import describe
from models.verify import Verified, emit
from services.config import Probation, ServiceConfig
from services.drafts import DraftSource, Loaded, State, choose_boot_draft, label, read_state, write_state
from services.reconciler import MAX_WAIT_S, Reconciler
from tests.conftest import make_draft

THRESHOLD = 0.01
PROMPTS = ([5, 6, 7, 8], [40, 41, 42])
Spoil = Callable[[dict[str, Tensor]], None]


def accept_everything(draft_tokens: Tensor, q: Tensor, p: Tensor, rng: torch.Generator, params: BaseParams) -> Verified:
    return emit(draft_tokens, torch.ones_like(draft_tokens, dtype=torch.bool), p.argmax(dim=-1))


class FaultyEngine(TorchEngine):
    """The reference engine with a fault for each draft that is to have one; it counts what it reads and answers."""

    faults: dict[str, str]
    num_asked = num_reading = most_reading = num_running = most_running = 0

    @cached_property
    def sound(self) -> tuple[Any, BaseParams]:
        return self._rules[True]

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        request_id: str,
        on_first_token: Callable[[], None] | None = None,
    ) -> Completion:
        assert request_id.startswith("probe-")
        assert on_first_token is not None

        def read() -> None:
            self.num_reading -= 1
            on_first_token()

        self.num_asked += 1
        self.num_reading += 1
        self.num_running += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._generate(prompt_ids, sampling, request_id, read)
        finally:
            self.num_running -= 1

    async def _generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, on_first_token: Callable[[], None]
    ) -> Completion:
        fault = self.faults.get(self.draft_version)
        if fault == "hangs":
            await asyncio.sleep(60)
        if fault == "stumbles" and request_id.endswith("-1"):
            raise RuntimeError("the engine stumbled")
        rule, params = self.sound
        self._rules[True] = (SimpleNamespace(verify=accept_everything) if fault == "corrupts" else rule), params
        return await super().generate(prompt_ids, sampling, request_id, on_first_token)

    async def swap_draft(self, directory: Path, version: str) -> float:
        fault = self.faults.get(version)
        if fault == "refuses":
            raise ValueError("draft mismatch")
        if fault == "crashes":
            raise RuntimeError("the worker did not answer")
        swap_ms = await super().swap_draft(directory, version)
        if fault == "mangles":
            with torch.no_grad():
                self._draft.fc.weight += 1
        return swap_ms


class World:
    """One registry, and replicas over it that can be restarted."""

    def __init__(self, home: Path, target: Path, goldens: list[Golden]) -> None:
        self.home, self.target, self.goldens = home, target, goldens
        self.registry = Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts")
        self.config = ServiceConfig(
            target_dir=target, registry_uri="unused", artifact_root=home, querylog=home / "q.db", cache=home / "cache",
            state=home / "state.json", min_swap_interval_s=0, probation=Probation(timeout_s=5),
        )  # fmt: skip
        self.card = describe(target)
        self.source = DraftSource(self.registry, self.config.cache, self.card, eagle3.check)
        self.engine: FaultyEngine
        self.faults: dict[str, str] = {}
        self.loop: Reconciler
        self.counts: Counter[str] = Counter()
        self.runner = asyncio.Runner()  # one event loop, as a replica has

    def push(
        self, tags: dict[str, str] | None = None, *, fault: str = "", spoil: Spoil | None = None, vocab_size: int = 64
    ) -> Version:
        """Register a draft and make it the champion."""
        number = len(list(self.home.glob("made/*")))
        directory = self.home / "made" / str(number)
        directory.mkdir(parents=True)
        make_draft(self.target, directory, seed=number, vocab_size=vocab_size)
        if spoil is not None:
            tensors = load_file(directory / eagle3.WEIGHTS)
            spoil(tensors)
            save_file(tensors, directory / eagle3.WEIGHTS)
            write_manifest(directory)
        lineage = dict.fromkeys(LINEAGE_TAGS, "") | {
            "target_sha256": self.card.sha256,
            "tokenizer_sha256": self.card.tokenizer_sha256,
            "vocab_size": str(self.card.vocab_size),
            "probe_tau": "1.0",
        }
        version = self.registry.register("draft", directory, lineage | (tags or {}))
        self.registry.promote("draft", version.number)
        if fault:
            self.faults[str(version.number)] = fault
        return version

    def boot(self, **changes: object) -> Loaded | None:
        self.config = self.config.model_copy(update=changes)
        self.counts = Counter()
        boot, state = choose_boot_draft(self.source, read_state(self.config.state), self.counts)
        directory, version = (boot.directory, str(boot.version.number)) if boot else (None, "")
        self.engine = self.runner.run(FaultyEngine.start(self.target, directory, Params(), draft_version=version))
        self.engine.faults = self.faults
        self.loop = Reconciler(self.engine, self.source, self.goldens, THRESHOLD, self.config, boot, state, self.counts)
        return boot

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.run(self.loop.tick())

    def make_due(self) -> None:
        """Let the waits of the postponed drafts be over."""
        assert self.loop.postponed
        self.loop.postponed = {name: one._replace(due_s=0.0) for name, one in self.loop.postponed.items()}

    def champion(self) -> int | None:
        champion = self.registry.champion("draft")
        return champion.number if champion else None

    def serving(self) -> int | None:
        """The draft that serves; what the loop says and what the engine holds must agree."""
        if self.loop.serving is None:
            return None
        number = self.loop.serving.version.number
        assert self.engine.draft_version == str(number)
        self.runner.run(self.engine.check_draft(self.loop.serving.directory))
        return number


@pytest.fixture(scope="session")
def goldens(tiny_target: Path) -> list[Golden]:
    async def ask() -> list[Golden]:
        engine = await TorchEngine.start(tiny_target, None, Params())
        sampling = Sampling(max_tokens=8, num_logprobs=2)
        answers = [await engine.generate(list(prompt), sampling, "golden") for prompt in PROMPTS]
        return [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in answers]

    return asyncio.run(ask())


@pytest.fixture
def world(store: Path, tiny_target: Path, goldens: list[Golden], tmp_path: Path) -> Iterator[World]:
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    world = World(tmp_path, tiny_target, goldens)
    with world.runner:
        yield world


@pytest.fixture
def running(world: World) -> World:
    """A replica that serves draft 1 after its probation."""
    world.push()
    world.boot()
    world.tick()
    assert (world.serving(), world.engine.speculating) == (1, True)
    assert world.loop.proof is not None
    return world


def test_a_new_champion_is_swapped_in_and_remembered(running: World) -> None:
    running.push()
    running.tick(2)
    assert (running.serving(), running.counts["swaps"]) == (2, 1)
    assert running.loop.proof is not None
    assert (running.loop.proof.weight_error, running.loop.proof.promised_tau) == (0.0, 1.0)
    assert [version.number for version in read_state(running.config.state).good] == [2, 1]


def test_golden_prompts_are_read_one_by_one_and_answered_side_by_side(world: World) -> None:
    world.goldens = world.goldens * 3
    world.push()
    world.boot()
    world.tick()
    assert (world.serving(), world.engine.most_reading) == (1, 1)
    assert world.engine.most_running > 2


def test_a_golden_prompt_that_the_engine_can_not_answer_ends_the_probation_and_the_others(world: World) -> None:
    world.goldens = world.goldens * 3
    world.push()
    world.boot()
    world.tick()
    world.push(fault="stumbles")
    num_asked = world.engine.num_asked
    with pytest.raises(RuntimeError, match="stumbled"):
        world.tick()
    assert (world.serving(), world.engine.num_running) == (1, 0)
    assert world.engine.num_asked == num_asked + 2


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight"]


def make_nan(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "fault", "tags", "reason"),
    [
        (drop, "", {}, "fc.weight is missing"),
        (make_nan, "", {}, "fc.weight holds NaN"),
        (None, "refuses", {}, "draft mismatch"),
        (None, "mangles", {}, "fc.weight of the loaded draft differs"),
        (None, "corrupts", {}, "another output"),
        (None, "", {"probe_tau": "3.9"}, "promised 3.900"),
        (None, "", {"probe_tau": ""}, "tag probe_tau is ''"),
        (None, "", {"probe_tau": "nan"}, "wanted a number from 1"),
    ],
    ids=["file", "nan", "swap", "weights", "output", "acceptance", "no figure", "no number"],
)
def test_a_bad_draft_is_taken_back_quarantined_and_never_tried_again(
    running: World, spoil: Spoil | None, fault: str, tags: dict[str, str], reason: str
) -> None:
    bad = running.push(tags, fault=fault, spoil=spoil)
    running.tick(3)
    assert running.serving() == 1
    assert running.engine.speculating
    assert running.counts["refused"] == 1
    assert reason in running.loop.refused[label(bad)]
    assert reason in running.registry.get("draft", bad.number).tags["quarantined"]
    assert running.champion() == 1
    assert read_state(running.config.state).refused == {label(bad): running.loop.refused[label(bad)]}


@pytest.mark.parametrize("tag", ["target_sha256", "tokenizer_sha256", "vocab_size"])
def test_a_draft_for_another_target_is_left_alone(running: World, tag: str) -> None:
    other = running.push({tag: "5"})
    running.tick(3)
    assert (running.serving(), running.counts["unfit"], running.champion()) == (1, 1, other.number)
    assert tag in running.loop.refused[label(other)]
    assert read_state(running.config.state).refused == {}


def test_files_that_are_not_what_was_registered_are_refused(running: World) -> None:
    bad = running.push()
    stored = max(running.home.glob(f"artifacts/**/{eagle3.WEIGHTS}"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    running.tick()
    assert running.serving() == 1
    assert "sha256" in running.loop.refused[label(bad)]


def test_a_draft_of_another_shape_asks_for_a_new_replica_which_boots_with_it(running: World) -> None:
    running.push(vocab_size=32)
    running.tick(2)
    assert running.serving() == 1
    assert "draft_vocab_size" in (running.loop.replacement or "")
    running.boot()
    running.tick()
    assert (running.serving(), running.loop.replacement) == (2, None)


def test_an_engine_without_a_draft_asks_to_be_replaced_when_one_comes(world: World) -> None:
    assert world.boot() is None
    world.tick()
    assert (world.loop.replacement, world.loop.fallback) == (None, "no draft")
    world.push()
    world.tick()
    assert "started without one" in (world.loop.replacement or "")


def test_a_draft_that_the_engine_fails_to_take_is_tried_again_after_waits_that_double(running: World) -> None:
    running.boot(probation=Probation(timeout_s=1000))
    running.tick()
    version = running.push(fault="crashes")
    for num_attempts, wait_s in ((1, 1000.0), (2, 2000.0), (3, MAX_WAIT_S)):
        with pytest.raises(RuntimeError, match="did not answer"):
            running.tick()
        assert running.serving() == 1
        postponed = running.loop.postponed[label(version)]
        assert (postponed.num_attempts, postponed.wait_s) == (num_attempts, wait_s)
        running.tick()  # too early
        assert running.counts["postponed"] == num_attempts
        running.make_due()
    assert label(version) not in running.loop.refused
    running.faults.clear()
    running.tick()
    assert (running.serving(), running.loop.postponed) == (2, {})
    assert "quarantined" not in running.registry.get("draft", version.number).tags


def test_a_probation_that_takes_too_long_is_ended_and_tried_again_later(running: World) -> None:
    running.boot(probation=Probation(timeout_s=2))
    running.tick()
    version = running.push(fault="hangs")
    running.tick(2)
    assert (running.serving(), running.counts["postponed"]) == (1, 1)
    assert "more than 2 s on probation; the next comes in " in running.loop.postponed[label(version)].describe()
    running.faults.clear()
    running.make_due()
    running.tick()
    assert (running.serving(), running.loop.postponed) == (2, {})


def test_a_boot_draft_that_can_not_be_judged_goes_on_serving_and_holds_up_no_other_champion(world: World) -> None:
    boot = world.push(fault="hangs")
    world.boot(probation=Probation(timeout_s=2))
    world.tick(2)
    assert (world.serving(), world.engine.speculating, world.loop.proof) == (1, True, None)
    assert world.loop.postponed[label(boot)].num_attempts == 1
    champion = world.push(fault="crashes")
    with pytest.raises(RuntimeError, match="did not answer"):
        world.tick()
    world.tick()  # too early for either
    assert (world.serving(), set(world.loop.postponed)) == (1, {label(boot), label(champion)})
    world.faults.clear()
    world.push()
    world.tick(2)
    assert (world.serving(), world.loop.postponed) == (3, {})


@pytest.fixture
def undecided(world: World) -> World:
    """A replica whose boot draft could not be judged, because the engine stumbled."""
    boot = world.push(fault="stumbles")
    world.boot()
    with pytest.raises(RuntimeError, match="stumbled"):
        world.tick()
    world.tick()
    assert (world.loop.postponed[label(boot)].reason, world.loop.proof) == ("RuntimeError", None)
    return world


def test_a_postponed_boot_draft_is_proven_when_its_wait_is_over(undecided: World) -> None:
    undecided.faults.clear()
    undecided.make_due()
    undecided.tick()
    assert undecided.loop.postponed == {}
    assert undecided.loop.proof is not None


def test_a_postponed_boot_draft_that_turns_out_bad_is_refused(undecided: World) -> None:
    (boot,) = undecided.loop.postponed
    undecided.faults["1"] = "corrupts"
    undecided.make_due()
    undecided.tick()
    assert undecided.loop.postponed == {}
    assert (undecided.serving(), "another output" in undecided.loop.refused[boot]) == (None, True)


@pytest.mark.parametrize("champion", [1, 3])
def test_what_is_no_champion_any_more_is_not_tried_again(running: World, champion: int) -> None:
    running.push(fault="crashes")
    with pytest.raises(RuntimeError, match="did not answer"):
        running.tick()
    if champion == 3:
        running.push()
    else:
        running.registry.promote("draft", champion)
    running.tick()
    assert (running.serving(), running.loop.postponed) == (champion, {})


def test_without_a_good_draft_speculation_goes_off_until_one_comes(world: World) -> None:
    world.push({"probe_tau": "3.9"})
    world.boot()
    world.tick()
    assert (world.serving(), world.engine.speculating, world.champion()) == (None, False, None)
    assert world.loop.fallback == "no good draft"
    world.push()
    world.tick()
    assert (world.serving(), world.engine.speculating, world.loop.fallback) == (2, True, None)


def test_a_bad_boot_draft_gives_way_to_the_last_good_one(running: World) -> None:
    running.push({"probe_tau": "3.9"})
    assert running.boot().version.number == 2  # type: ignore[union-attr]
    running.tick(2)
    assert (running.serving(), running.engine.speculating, running.champion()) == (1, True, 1)


def test_when_the_last_good_draft_can_not_be_put_back_speculation_goes_off(running: World) -> None:
    running.push(fault="mangles")
    running.faults["1"] = "crashes"
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.counts["errors"] == 1


def test_while_the_registry_is_down_the_last_good_draft_serves_and_a_bad_one_is_reported_later(running: World) -> None:
    bad = running.push({"probe_tau": "3.9"})
    database = running.home / "mlflow.db"
    running.source.fetch(bad)  # it is in the cache
    champion = running.source.champion()
    with sqlite3.connect(database) as db:
        db.execute("ALTER TABLE model_versions RENAME TO gone")
    with pytest.raises(StoreUnavailable):
        running.tick()
    assert running.serving() == 1
    assert champion is not None
    with pytest.raises(StoreUnavailable):
        running.runner.run(running.loop._follow(champion))
    assert running.serving() == 1
    with sqlite3.connect(database) as db:
        db.execute("ALTER TABLE gone RENAME TO model_versions")
    running.tick()
    assert running.champion() == 1
    assert "quarantined" in running.registry.get("draft", bad.number).tags


def test_a_replica_starts_from_the_cache_while_the_registry_is_down(running: World) -> None:
    (running.home / "mlflow.db").write_bytes(b"not a database")
    running.registry = Registry(f"sqlite:///{running.home}/mlflow.db", running.home / "artifacts")
    running.source = DraftSource(running.registry, running.config.cache, running.card, eagle3.check)
    boot = running.boot()
    assert boot is not None
    assert boot.version.number == 1
    assert running.counts["registry_unavailable"] == 1


def test_an_alias_on_something_foreign_changes_nothing_and_keeps_no_replica_from_starting(running: World) -> None:
    from mlflow import MlflowClient  # not at the top: it reads variables that the registry sets first

    by_hand = MlflowClient(running.registry.store.uri, running.registry.store.uri)
    by_hand.create_model_version("draft", source=running.home.as_uri())
    by_hand.set_registered_model_alias("draft", CHAMPION, "2")
    with pytest.raises(ForeignVersion):
        running.tick()
    assert running.serving() == 1
    boot = running.boot()
    assert boot is not None
    assert (boot.version.number, running.counts["errors"]) == (1, 1)


def test_swaps_are_kept_apart(running: World) -> None:
    running.config = running.config.model_copy(update={"min_swap_interval_s": 3600})
    running.boot()
    running.tick()
    running.push()
    running.tick()
    running.push()
    running.tick(2)
    assert (running.serving(), running.counts["swaps"], running.counts["deferred"]) == (2, 1, 2)


def test_while_an_operator_has_speculation_off_nothing_is_swapped(running: World) -> None:
    running.push()
    assert running.runner.run(running.loop.set_speculation(False)) is False
    running.tick()
    assert (running.serving(), running.engine.speculating) == (1, False)
    assert running.runner.run(running.loop.set_speculation(True)) is True
    running.tick()
    assert (running.serving(), running.engine.speculating) == (2, True)


def test_an_operator_can_not_switch_on_what_has_no_good_draft(world: World) -> None:
    world.boot()
    assert world.runner.run(world.loop.set_speculation(True)) is False


def test_a_served_draft_that_was_quarantined_elsewhere_is_retired(running: World) -> None:
    running.registry.revert("draft", 1, "worse on live traffic")
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.loop.fallback == "draft 1 was quarantined"
    assert read_state(running.config.state).good == ()


def test_the_loop_outlives_every_fault_and_counts_it(running: World) -> None:
    running.push(fault="crashes")

    async def run() -> None:
        running.loop._config = running.config.model_copy(update={"poll_s": 0.01, "probation": Probation(timeout_s=0.1)})
        task = asyncio.create_task(running.loop.run())
        async with asyncio.timeout(10):
            while running.counts["errors"] < 3:
                await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    running.runner.run(run())
    assert running.counts["postponed"] >= 3


@pytest.mark.parametrize("content", ["", "{}x", '{"good": 1}'])
def test_a_damaged_state_is_refused_and_a_missing_one_is_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    assert read_state(path) == State()
    path.write_text(content)
    with pytest.raises(ValueError, match=r"state\.json"):
        read_state(path)


def test_a_state_survives_writing(world: World) -> None:
    state = State().with_good(world.push()).with_refused(world.push(), "bad")
    write_state(world.config.state, state)
    assert read_state(world.config.state) == state
    assert state.with_refused(state.good[0], "too").good == ()
    assert list(world.home.glob(".state*")) == []
