"""The loop's decisions against a real registry, real drafts and the reference engine, which starts in no time.

Where a fault can't be written into a file, the engine has it: `FaultyEngine` misbehaves while the versions named in
`faults` are loaded. The production engine is driven in test_service.py.
"""

import asyncio
import json
import math
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.artifacts import remove_unheld, write_manifest
from infra.champions import CHAMPION
from infra.database import Database
from infra.events import PAIR_BROKE, TARGET_DIFFERS
from infra.processes import free_port
from infra.registry import Registry
from infra.settings import Settings
from infra.status import Phase
from infra.store import StoreUnavailable
from infra.versions import ForeignVersion, Version, is_quarantined, label
from models import catalog
from models.core.drafting.draft_families import family_named
from models.core.drafting.proposal import Proposal
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import CanaryParams, Golden
from models.engines import Completion, NotSwitchable, Sampling
from models.engines.torch import Params, TorchEngine
from models.params import BaseParams
from models.serving import Probation, Serve
from models.targets import describe
from models.verify import Verified, emit
from services.config import ServiceConfig
from services.drafts import (
    MAX_FAILED_STARTS,
    DraftHistory,
    DraftSource,
    Loaded,
    recall,
    remember,
    start_engine,
)
from services.probation import FIRST, LAST
from services.reconciler import Reconciler, ReplicaHooks
from services.swap import Fetch
from tests.conftest import make_draft
from tests.drills.spoiled import NAN, config_changed
from tests.models.drafts.tiny import save_tiny
from tests.object_store import Bucket
from tests.tags import tags_for

THRESHOLD = 0.01
PROMPTS = ([5, 6, 7, 8], [40, 41, 42])
Spoil = Callable[[Path], None]


def accept_everything(proposal: Proposal, p: Tensor, rng: torch.Generator, params: BaseParams) -> Verified:
    return emit(proposal, torch.tensor([proposal.num_tokens]), p[:, -1].argmax(dim=-1))


class FaultyEngine(TorchEngine):
    """The reference engine with a fault for each draft that is to have one; it counts what it reads and answers."""

    faults: dict[str, str]
    accepts: int | None = None  # of three drafted tokens, as it reports them
    priorities: set[int] = set()  # noqa: RUF012 - replaced for each engine
    num_asked = num_reading = most_reading = num_running = most_running = 0

    @cached_property
    def sound(self) -> tuple[Any, BaseParams]:
        return self.rules[True]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, name: str, told: Any = None) -> Completion:
        assert name.startswith("golden-")

        def read() -> None:
            self.num_reading -= 1
            told()

        self.num_asked += 1
        self.priorities.add(sampling.priority)
        self.num_reading += 1
        self.num_running += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        self.most_running = max(self.most_running, self.num_running)
        fault, (rule, params) = self.faults.get(self.draft_version), self.sound
        self.rules[True] = (SimpleNamespace(verify=accept_everything) if fault == "corrupts" else rule), params
        try:
            if fault == "hangs":
                await asyncio.Event().wait()
            if fault == "stumbles" and name.endswith("-1"):
                raise RuntimeError("the engine stumbled")
            completion = await super().generate(prompt_ids, sampling, name, read)
        finally:
            self.num_running -= 1
        if self.accepts is None or not self.speculating:
            return completion
        steps = math.ceil((len(completion.token_ids) - 1) / (self.accepts + 1))
        counts = {"drafted": (3,) * steps, "accepted": (self.accepts,) * steps}
        return completion.model_copy(update={**counts, "drafted_ids": ((1, 2, 3),) * steps})

    async def swap_draft(self, directory: Path, version: str) -> float:
        fault = self.faults.get(version)
        if fault == "refuses":
            raise ValueError("draft mismatch")
        if fault == "crashes":
            raise RuntimeError("the worker did not answer")
        swap_ms = await super().swap_draft(directory, version)
        if fault == "mangles":
            with torch.no_grad():
                self.loaded.fc.weight += 1
        return swap_ms


class World:
    """One registry, and replicas over it that can be restarted."""

    def __init__(self, home: Path, target: Path, goldens: list[Golden]) -> None:
        self.home, self.target, self.goldens, self.card = home, target, goldens, describe(target)
        serve = Serve(min_swap_interval_s=0, probation=Probation(timeout_s=60))
        self.config = ServiceConfig(target_dir=target, settings=Settings(home=home), serve=serve)
        self.connect()
        self.engine: FaultyEngine
        self.faults: dict[str, str] = {}
        self.unstartable: dict[str, Exception] = {}  # by version, "" for the target alone
        self.loop: Reconciler
        self.counts: Counter[str] = Counter()
        self.runner = asyncio.Runner()  # one event loop, as a replica has
        self.traffic: list[AcceptanceCount] = []
        self.told: list[str] = []

    def connect(self, artifacts: str = "") -> None:
        """Open the registry; the next versions' files lie in the home or at an address."""
        place, database = self.home / "artifacts", Database(self.home / "queries.db")
        self.registry = Registry(f"sqlite:///{self.home}/mlflow.db", place, database, artifacts)
        self.source = self.make_source()

    def make_source(self, kind: type[DraftSource] = DraftSource, k: int = Params().num_draft_tokens) -> Any:
        return kind(self.registry, self.config.settings.cache, self.card, k)

    def push(
        self,
        tags: dict[str, str] | None = None,
        *,
        fault: str = "",
        spoil: Spoil | None = None,
        vocab_size: int = 64,
        family: str = "eagle3",
    ) -> Version:
        """Register a draft, `spoil` of which may change its files, and make it the champion."""
        number = len(list(self.home.glob("made/*")))
        directory = self.home / "made" / str(number)
        directory.mkdir(parents=True)
        if family == "eagle3":
            make_draft(self.target, directory, seed=number, vocab_size=vocab_size)
        else:
            save_tiny(family_named(family), self.target, directory, seed=number)
        if spoil is not None:
            spoil(directory)
            write_manifest(directory)
        version = self.registry.register("draft", directory, tags_for(self.card) | (tags or {}))
        self.registry.promote("draft", version.number)
        if fault:
            self.faults[str(version.number)] = fault
        return version

    def boot(self, **changes: object) -> int | None:
        """Start an engine and a loop; return the draft that it started with."""
        self.config = self._with(**changes)
        self.counts = Counter()
        started = start_engine(self.start, self.source, self.config.memory, self.counts)
        self.engine, boot, memory = self.runner.run(started)
        self.engine.faults, self.engine.priorities = self.faults, set()
        told = (self.config, boot, memory, self.counts)
        self.loop = Reconciler(self.engine, self.source, self.goldens, THRESHOLD, *told)
        return boot.version.number if boot else None

    def serve(self, tags: dict[str, str] | None = None, **pushed: Any) -> Version:
        """Make a draft the champion, start with it, and look once."""
        version = self.push(tags, **pushed)
        self.boot()
        self.tick()
        return version

    def configure(self, **serve: object) -> None:
        """Change the running loop's settings."""
        self.loop._config = self._with(**serve)

    def _with(self, **serve: object) -> ServiceConfig:
        return self.config.model_copy(update={"serve": self.config.serve.model_copy(update=serve)})

    async def start(self, draft: Loaded | None) -> FaultyEngine:
        """Start an engine with a draft or without; the machine may stand in the way."""
        directory, version = (draft.directory, str(draft.version.number)) if draft else (None, "")
        if version in self.unstartable:
            raise self.unstartable[version]
        params = Params(num_draft_tokens=self.source.served_k(draft.version)) if draft else Params()
        engine = await FaultyEngine.start(self.target, directory, params, draft_version=version)
        assert isinstance(engine, FaultyEngine)
        return engine

    def clear(self, version: Version) -> None:
        """Take a quarantine back and promote the version again, as a person does."""
        self.registry.store.client.delete_model_version_tag("draft", str(version.number), "quarantined")
        self.registry.promote("draft", version.number)

    def is_quarantined(self, version: Version) -> bool:
        return is_quarantined(self.registry.get("draft", version.number))

    def remembered(self) -> DraftHistory:
        return recall(self.config.memory, Counter())

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.run(self.loop.tick())

    def make_due(self) -> None:
        """Let the waits of the postponed drafts be over."""
        assert self.loop.state.postponed
        due = {name: one._replace(due_s=0.0) for name, one in self.loop.state.postponed.items()}
        self.loop.state = replace(self.loop.state, postponed=due)

    def champion(self) -> int | None:
        champion = self.registry.champion("draft")
        return champion.number if champion else None

    def serving(self) -> int | None:
        """The draft that serves; what the loop says and what the engine holds must agree."""
        if self.loop.state.serving is None:
            return None
        number = self.loop.state.serving.version.number
        assert self.engine.draft_version == str(number)
        self.runner.run(self.engine.check_draft(self.loop.state.serving.directory))
        return number

    def require(self, serving: int | None, **counts: int) -> None:
        """Require what serves, that the engine drafts where something does, and how often what happened."""
        assert (self.serving(), self.engine.speculating) == (serving, serving is not None)
        assert {name: self.counts[name] for name in counts} == counts


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
    world.serve()
    world.require(1)
    assert world.loop.state.proof is not None
    return world


def test_a_new_champion_is_swapped_in_and_remembered(running: World) -> None:
    running.push()
    running.tick(2)
    running.require(2, swaps=1)
    assert running.loop.state.proof is not None
    assert (running.loop.state.proof.weight_error, running.loop.state.proof.promised_tau) == (0.0, 1.0)
    assert [version.number for version in running.remembered().good] == [2, 1]


@pytest.mark.slow
def test_golden_prompts_are_read_one_by_one_and_answered_side_by_side(world: World) -> None:
    world.goldens = world.goldens * 3
    world.serve()
    assert (world.serving(), world.engine.most_reading) == (1, 1)
    assert world.engine.most_running > 2


@pytest.mark.slow
def test_a_golden_prompt_that_the_engine_can_not_answer_ends_the_probation_and_the_others(world: World) -> None:
    world.goldens = world.goldens * 3
    world.serve()
    world.push(fault="stumbles")
    num_asked = world.engine.num_asked
    with pytest.raises(RuntimeError, match="stumbled"):
        world.tick()
    assert (world.serving(), world.engine.num_running) == (1, 0)
    assert world.engine.num_asked == num_asked + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "fault", "tags", "reason"),
    [
        (NAN, "", {}, "fc.weight holds NaN"),
        (None, "refuses", {}, "draft mismatch"),
        (None, "mangles", {}, "fc.weight of the loaded draft differs"),
        (None, "corrupts", {}, "another output"),
        (None, "", {"golden_tau": "3.9"}, "promised 3.900"),
        (None, "", {"golden_tau": ""}, "tag golden_tau is empty"),
    ],
    ids=["file", "swap", "weights", "output", "acceptance", "no figure"],
)
def test_a_bad_draft_is_taken_back_quarantined_and_never_tried_again(
    running: World, spoil: Spoil | None, fault: str, tags: dict[str, str], reason: str
) -> None:
    bad = running.push(tags, fault=fault, spoil=spoil)
    running.tick(3)
    running.require(1, refused=1)
    assert reason in running.loop.state.refused[label(bad)]
    assert reason in running.registry.get("draft", bad.number).tags["quarantined"]
    assert running.champion() == 1
    assert running.remembered().refused == running.loop.state.refused


@pytest.mark.slow
def test_where_speculation_can_not_be_switched_off_another_output_is_no_drafts_fault(
    running: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(on: bool) -> None:
        if not on:
            raise NotSwitchable("somebody else's server")

    monkeypatch.setattr(running.engine, "set_speculation", refuse)
    other = running.push(fault="corrupts")
    running.tick(3)
    assert (running.serving(), running.is_quarantined(other)) == (1, False)
    assert running.loop.state.refused == {}
    assert "unknown cause: somebody else's server" in running.loop.state.postponed[label(other)].reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pushed", "named"),
    [
        *(({"tags": {tag: "5"}}, tag) for tag in ("target_sha256", "tokenizer_sha256", "vocab_size")),
        ({"spoil": config_changed(redraft={"family": "a_newer"})}, "is of family 'a_newer'"),
    ],
)
def test_a_draft_for_another_target_or_of_a_family_that_a_newer_release_has_is_left_alone(
    running: World, pushed: dict[str, Any], named: str
) -> None:
    other = running.push(**pushed)
    running.tick(3)
    running.require(1, unfit=1)
    assert running.champion() == other.number
    assert named in running.loop.state.refused[label(other)]
    assert running.remembered().refused == {}


@pytest.mark.parametrize("found", ["elsewhere", "by an operator", "on probation"])
def test_after_a_quarantine_the_replica_answers_on_where_the_last_draft_does_not_fit(
    running: World, found: str
) -> None:
    bad = running.serve({"golden_tau": "3.9"} if found == "on probation" else None, vocab_size=32)
    if found == "elsewhere":
        running.registry.revert("draft", bad.number, "worse on live traffic")
    if found == "by an operator":
        running.registry.roll_back("draft", "worse on live traffic")
    running.tick(3)
    assert running.is_quarantined(bad)
    running.require(None)
    assert (running.champion(), running.loop.state.replacement) == (1, None)
    told = running.loop.state.refused
    assert any("draft_vocab_size" in why and "next start" in why for why in told.values()), told
    assert running.boot() == 1
    running.tick()
    running.require(1)


def test_going_back_without_a_quarantine_asks_for_a_new_replica_as_any_champion_does(running: World) -> None:
    running.serve(vocab_size=32)
    running.registry.roll_back("draft")
    running.tick()
    assert "draft_vocab_size" in (running.loop.state.replacement or "")


def test_a_replica_without_a_draft_answers_on_where_a_quarantine_brings_another_champion(running: World) -> None:
    running.push(spoil=NAN)
    running.config.memory.unlink()
    assert running.boot() is None
    running.tick(2)
    assert (running.champion(), running.loop.state.replacement) == (1, None)
    assert running.boot() == 1


OTHERS = [name for name in catalog.names("drafts") if name != "eagle3" and family_named(name).SERVED]


@pytest.mark.slow
@pytest.mark.parametrize("pushed", [{"vocab_size": 32}, *({"family": name} for name in OTHERS)], ids=str)
def test_a_draft_of_another_shape_or_family_asks_for_a_new_replica_which_boots_with_it(
    running: World, pushed: dict[str, Any]
) -> None:
    running.push(**pushed)
    running.tick(2)
    assert (running.serving(), running.champion(), running.loop.state.refused) == (1, 2, {})
    told = running.loop.state.replacement or ""
    assert told.startswith("draft 2 needs a replica of its own")
    named = f"is of family {pushed['family']}, the served draft of eagle3" if "family" in pushed else "draft_vocab_size"
    assert named in told
    running.boot()
    running.tick()
    assert (running.serving(), running.loop.state.replacement) == (2, None)
    assert "quarantined" not in running.registry.get("draft", 2).tags


@pytest.mark.slow
def test_a_draft_of_another_k_asks_for_a_new_replica_which_boots_with_its_k(running: World) -> None:
    running.push({"num_draft_tokens": "5"})
    running.tick(2)
    assert (running.serving(), running.champion(), running.loop.state.refused) == (1, 2, {})
    assert "draft 2 drafts 5 tokens a step, this replica 3" in (running.loop.state.replacement or "")
    running.boot()
    assert running.engine.params.num_draft_tokens == 5
    running.tick(2)
    assert (running.serving(), running.loop.state.replacement) == (2, None)
    for tags in ({}, {"num_draft_tokens": "5"}):  # the first of before the tag was written: not compared
        pushed = running.push(tags)
        running.tick()
        assert (running.serving(), running.loop.state.replacement) == (pushed.number, None)


@pytest.mark.slow
def test_a_good_draft_of_another_k_is_not_fallen_back_to(world: World) -> None:
    for k in (3, 5):
        world.serve({"num_draft_tokens": str(k)})
    assert [version.number for version in world.remembered().good] == [2, 1]
    world.faults["2"] = "refuses"
    world.push({"num_draft_tokens": "5"}, fault="corrupts")
    world.tick()
    world.require(None)
    assert world.loop.state.fallback == "no good draft"


def test_a_configured_k_of_0_stays(world: World) -> None:
    version = world.push({"num_draft_tokens": "5"})
    assert world.source.served_k(version) == 5
    assert world.make_source(k=0).served_k(version) == 0


def test_an_engine_without_a_draft_asks_to_be_replaced_when_one_comes(world: World) -> None:
    assert world.boot() is None
    world.tick()
    assert (world.loop.state.replacement, world.loop.state.fallback) == (None, "no draft")
    world.push()
    world.tick()
    assert "started without one" in (world.loop.state.replacement or "")


@pytest.mark.slow
def test_a_probation_that_takes_too_long_is_ended_and_tried_again_later(running: World) -> None:
    version = running.push(fault="hangs")
    running.configure(probation=Probation(timeout_s=1))
    running.tick(2)
    running.require(1, postponed=1)
    assert running.loop.state.postponed[label(version)].reason == "took more than 1 s"
    running.faults.clear()
    running.configure(probation=Probation(timeout_s=60))
    running.make_due()
    running.tick()
    assert (running.serving(), running.loop.state.postponed) == (2, {})


@pytest.mark.slow
def test_a_boot_draft_that_can_not_be_scored_serves_on_and_holds_up_no_champion(world: World) -> None:
    boot = world.push(fault="stumbles")
    world.boot()
    with pytest.raises(RuntimeError, match="stumbled"):
        world.tick()
    world.tick()
    world.require(1)
    assert (world.loop.state.postponed[label(boot)].reason, world.loop.state.proof) == ("RuntimeError", None)
    champion = world.push(fault="crashes")
    with pytest.raises(RuntimeError, match="did not answer"):
        world.tick()
    world.tick()  # too early for either
    assert (world.serving(), set(world.loop.state.postponed)) == (1, {label(boot), label(champion)})
    world.faults.clear()
    world.make_due()
    world.tick()
    assert (world.serving(), world.loop.state.postponed) == (champion.number, {})


@pytest.mark.slow
def test_a_draft_that_the_engine_did_not_start_with_waits_and_is_then_served(running: World) -> None:
    version = running.push()
    running.unstartable["2"] = MemoryError("no memory")
    assert (running.boot(), running.counts["postponed"]) == (1, 1)
    running.tick()
    assert (running.serving(), running.champion(), running.loop.state.refused) == (1, 2, {})
    assert "did not start with it" in running.loop.state.postponed[label(version)].reason
    running.make_due()
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)
    assert running.remembered().failed_starts == {}


def test_a_draft_that_only_the_target_starts_without_asks_for_a_new_replica_after_its_wait(world: World) -> None:
    version = world.push()
    world.unstartable["1"] = OSError("address in use")
    assert world.boot() is None
    world.tick()
    assert (world.loop.state.replacement, set(world.loop.state.postponed)) == (None, {label(version)})
    world.make_due()
    world.tick()
    assert "started without one" in (world.loop.state.replacement or "")
    world.unstartable.clear()
    world.boot()
    world.tick()
    assert (world.serving(), world.is_quarantined(version)) == (1, False)


def test_when_nothing_starts_no_draft_is_blamed(running: World) -> None:
    version, before = running.push(), running.remembered()
    running.unstartable = {number: OSError("address in use") for number in ("2", "1", "")}
    for _ in range(MAX_FAILED_STARTS + 1):
        with pytest.raises(OSError, match="address in use"):
            running.boot()
    assert running.remembered() == before
    running.unstartable.clear()
    assert running.boot() == 2
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


@pytest.mark.slow
def test_a_draft_that_alone_fails_start_after_start_is_refused_for_everyone(running: World) -> None:
    version = running.push()
    running.unstartable["2"] = OSError("address in use")
    for num_starts in range(1, MAX_FAILED_STARTS + 1):
        assert not running.is_quarantined(version)
        running.boot()
        running.tick()
        assert (running.serving(), label(version) in running.loop.state.refused) == (1, num_starts == MAX_FAILED_STARTS)
    assert (running.is_quarantined(version), running.champion()) == (True, 1)


def misquote(goldens: list[Golden]) -> list[Golden]:
    """Return references that the target itself does not give."""
    first, *others = goldens
    token_ids = ((first.token_ids[0] + 1) % 64, *first.token_ids[1:])
    return [first.model_copy(update={"token_ids": token_ids, "gaps": (1.0,) * len(token_ids)}), *others]


@pytest.mark.slow
def test_a_champion_is_not_blamed_for_an_output_that_the_target_alone_gives_too(running: World) -> None:
    running.loop._prompts._goldens = misquote(running.goldens)
    version = running.push()
    running.tick()
    running.require(1)
    state = running.loop.state
    assert (running.champion(), state.refused, set(state.postponed)) == (2, {}, {label(version)})
    running.loop._prompts._goldens = running.goldens
    running.make_due()
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


def test_a_draft_is_blamed_for_its_own_output_though_the_target_fails_elsewhere(running: World) -> None:
    running.loop._prompts._goldens = misquote(running.goldens)
    version = running.push(fault="corrupts")
    running.tick()
    running.require(1)
    assert running.loop.state.refused[label(version)].startswith("golden prompt 1 gave another output")


@pytest.mark.slow
def test_a_quarantine_that_somebody_cleared_stays_cleared_and_the_draft_is_tried_again(running: World) -> None:
    version = running.push(fault="corrupts")
    for _ in range(2):
        running.tick()
        assert (running.serving(), running.champion(), running.is_quarantined(version)) == (1, 1, True)
        running.clear(version)
    running.faults.clear()
    running.tick()
    assert (running.serving(), running.champion(), running.is_quarantined(version)) == (2, 2, False)
    assert running.remembered().refused == {}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"good", "refused"}, {*DraftHistory.model_fields}], ids=["of before", "of now"])
def test_a_replica_that_starts_again_does_not_report_what_somebody_cleared(running: World, keys: set[str]) -> None:
    version = running.push(fault="corrupts")
    running.tick()
    remembered = json.loads(running.config.memory.read_text())
    running.config.memory.write_text(json.dumps({key: remembered[key] for key in keys}))
    running.faults.clear()
    running.clear(version)
    assert running.boot() == 2
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


def test_a_refusal_that_the_registry_could_not_be_told_of_is_reported_after_a_restart(running: World) -> None:
    version = running.push()
    remember(running.config.memory, running.remembered().with_refused(version, "bad"), Counter())
    running.boot()
    running.tick()
    assert (running.serving(), running.champion(), running.is_quarantined(version)) == (1, 1, True)
    assert running.remembered().unreported == ()


@pytest.mark.slow
def test_without_a_good_draft_speculation_goes_off_until_one_comes(world: World) -> None:
    world.serve({"golden_tau": "3.9"})
    world.require(None)
    assert (world.champion(), world.loop.state.fallback) == (None, "no good draft")
    world.push()
    world.tick()
    world.require(2)
    assert world.loop.state.fallback is None


def test_when_the_last_good_draft_can_not_be_put_back_speculation_goes_off(running: World) -> None:
    running.push(fault="mangles")
    running.faults["1"] = "crashes"
    running.tick()
    running.require(None, errors=1)


def rename(database: Path, table: str, name: str) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(f"ALTER TABLE {table} RENAME TO {name}")


@contextmanager
def without(database: Path, table: str) -> Iterator[None]:
    """Let a database lack a table."""
    rename(database, table, "gone")
    yield
    rename(database, "gone", table)


@pytest.mark.slow
def test_while_the_registry_is_down_the_last_good_draft_serves_and_a_bad_one_is_reported_later(running: World) -> None:
    bad = running.push({"golden_tau": "3.9"})
    running.source.fetch(bad)  # it is in the cache
    champion = running.source.champion()
    assert champion is not None
    with without(running.home / "mlflow.db", "model_versions"):
        for look in (running.loop.tick, lambda: running.loop._do(Fetch(champion))):
            with pytest.raises(StoreUnavailable):
                running.runner.run(look())
            assert running.serving() == 1
    running.tick()
    assert (running.champion(), running.is_quarantined(bad)) == (1, True)


def test_a_replica_starts_from_the_cache_while_the_registry_is_down(running: World) -> None:
    (running.home / "mlflow.db").write_bytes(b"not a database")
    running.connect()
    assert (running.boot(), running.counts["registry_unavailable"]) == (1, 1)


@pytest.mark.slow
def test_a_draft_whose_object_store_is_gone_waits_and_the_last_good_one_serves_over_a_restart_too(
    running: World, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.connect(bucket.address)
    running.boot()
    running.tick()
    pushed = running.push()
    with monkeypatch.context() as gone:
        gone.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        running.connect(bucket.address)
        running.loop._source = running.source
        running.tick(2)
        running.require(1, artifacts_unavailable=1)
        assert (running.champion(), running.is_quarantined(pushed)) == (pushed.number, False)
        assert re.match(r"reading s3://.*manifest\.json: Could", running.loop.state.postponed[label(pushed)].reason)
        assert (running.boot(), running.counts["artifacts_unavailable"]) == (1, 1)
        running.tick()
        running.require(1)
    running.make_due()
    running.tick()
    running.require(pushed.number, errors=0)


def test_a_replica_holds_the_drafts_that_it_may_load_again_and_no_others(running: World) -> None:
    paths = [running.source.fetch(running.registry.get("draft", 1))]
    for _ in range(4):
        version = running.push()
        paths.append(running.config.settings.cache / "draft" / label(version))
        running.tick()
    assert running.serving() == 5
    # 1 is what the engine was started with; 5, 4 and 3 are good.
    assert [remove_unheld(path) for path in paths] == [False, True, False, False, False]


def test_an_alias_that_was_moved_to_something_foreign_is_put_back(running: World) -> None:
    by_hand = running.registry.store.client
    by_hand.create_model_version("draft", source=running.home.as_uri())
    by_hand.set_registered_model_alias("draft", CHAMPION, "2")
    running.tick()
    assert (running.serving(), running.champion(), running.loop.state.refused) == (1, 1, {})
    assert int(by_hand.get_model_version_by_alias("draft", CHAMPION).version) == 1


@pytest.mark.slow
def test_while_the_database_that_names_the_champion_is_out_of_reach_the_last_good_draft_serves(running: World) -> None:
    running.push()
    with without(running.home / "queries.db", "champions"):
        running.runner.run(running.loop.look())
        running.require(1, registry_unavailable=1)
        assert (running.boot(), running.counts["registry_unavailable"]) == (1, 1)
    running.tick()
    running.require(2, swaps=1)


@pytest.mark.slow
def test_a_champion_with_a_tag_changed_by_hand_is_left_alone_and_named(running: World) -> None:
    damaged = running.push()
    running.registry.store.client.set_model_version_tag("draft", str(damaged.number), "golden_tau", "nan")
    with pytest.raises(ForeignVersion, match=f"draft {damaged.number}: tag golden_tau is 'nan'"):
        running.tick()
    running.require(1)
    assert not running.is_quarantined(damaged)
    assert (running.boot(), running.counts["errors"]) == (1, 1)


@pytest.mark.slow
def test_a_draft_that_there_is_no_memory_for_is_not_loaded_and_comes_when_there_is(world: World) -> None:
    world.push()
    world.boot(min_free_memory_gib=1e6)
    world.tick()
    newer = world.push(fault="corrupts")  # were it loaded, its probation would refuse it
    world.tick(2)
    world.require(1, swaps=0, postponed=1, reverts=0)
    assert "GiB of memory are free, a swap wants 1000000.00" in world.loop.state.postponed[label(newer)].reason
    assert (world.loop.state.refused, world.champion()) == ({}, newer.number)
    world.faults.clear()
    world.configure(min_free_memory_gib=0.0)
    world.make_due()
    world.tick()
    world.require(newer.number, swaps=1)
    assert world.loop.state.postponed == {}


@pytest.mark.slow
def test_swaps_are_kept_apart(running: World) -> None:
    running.boot(min_swap_interval_s=3600)
    running.tick()
    running.push()
    running.tick()
    running.push()
    running.tick(2)
    assert (running.serving(), running.counts["swaps"], running.counts["deferred"]) == (2, 1, 2)


async def switch_off(world: World, begun: Callable[[], bool], go_on: Callable[[], object] = lambda: None) -> None:
    """Switch off when a look has got so far, and only then let it go on."""
    tick = asyncio.create_task(world.loop.tick())
    while not begun():
        await asyncio.sleep(0.001)
    assert await world.loop.set_speculation(False) is False
    assert not world.engine.speculating
    go_on()
    await tick
    assert not world.engine.speculating


def test_an_operator_who_switches_off_during_a_probation_at_start_gets_it_at_once(world: World) -> None:
    world.push(fault="hangs")
    world.boot()
    world.runner.run(switch_off(world, lambda: world.engine.num_asked > 0))
    assert (world.loop.state.postponed, world.counts["called_off"], world.engine.num_running) == ({}, 1, 0)
    world.faults.clear()
    assert world.runner.run(world.loop.set_speculation(True)) is True
    world.tick()
    assert (world.serving(), world.loop.state.proof is not None) == (1, True)


def test_an_operator_who_switches_off_while_a_champion_is_tried_gets_it_at_once(running: World) -> None:
    version = running.push(fault="hangs")
    num_asked = running.engine.num_asked
    running.runner.run(switch_off(running, lambda: running.engine.num_asked > num_asked))
    assert (running.serving(), running.loop.state.postponed, running.loop.state.refused) == (1, {}, {})
    running.faults.clear()
    assert running.runner.run(running.loop.set_speculation(True)) is True
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


class SlowSource(DraftSource):
    """Waits for a word with each draft that it fetches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fetching, self.may_go, self.fetched = threading.Event(), threading.Event(), threading.Event()

    def fetch(self, version: Version) -> Path:
        self.fetching.set()
        assert self.may_go.wait(60)
        path = super().fetch(version)
        self.fetched.set()
        return path


@pytest.mark.slow
@pytest.mark.parametrize("is_put_back", [False, True])
def test_an_operator_who_switches_off_during_a_fetch_gets_it_at_once(running: World, is_put_back: bool) -> None:
    running.push({"golden_tau": "3.9"} if is_put_back else None)
    if is_put_back:
        running.boot()
    slow = running.source = running.loop._source = running.make_source(SlowSource)
    running.runner.run(switch_off(running, slow.fetching.is_set, slow.may_go.set))
    assert (running.serving(), running.engine.speculating, running.counts["swaps"]) == (1, False, 0)


@pytest.mark.slow
def test_a_draft_that_is_not_put_back_in_time_leaves_speculation_off_until_it_is(running: World) -> None:
    running.push({"golden_tau": "3.9"})
    running.boot(probation=Probation(timeout_s=60, put_back_s=0.2))
    slow = running.source = running.loop._source = running.make_source(SlowSource)
    running.tick()
    assert (running.engine.speculating, running.counts["late"]) == (False, 1)
    assert running.loop.state.fallback == "the last good draft is being put back"
    running.loop._source = running.make_source()
    slow.may_go.set()  # the fetch that went on holds the folder
    assert slow.fetched.wait(60)
    running.configure(probation=Probation(timeout_s=60))
    running.tick(2)
    running.require(1)
    assert running.loop.state.fallback is None


def test_what_checks_a_draft_goes_before_traffic_and_what_checks_it_later_after_it(checked: World) -> None:
    assert checked.engine.priorities == {FIRST}
    checked.engine.priorities.clear()
    checked.tick()
    assert (checked.engine.priorities, checked.counts["canaries"]) == ({LAST}, 1)


def traffic(accepted: int) -> list[AcceptanceCount]:
    """Return the last requests of draft 1, which was promised a τ of 2.5."""
    numbers = range(CanaryParams().num_requests)
    return [AcceptanceCount(number, "chat", steps=9, drafted=27, accepted=9 * accepted) for number in numbers]


@pytest.fixture
def checked(world: World) -> World:
    """A replica that has proven a draft and is about to ask it the canary prompts."""
    world.goldens = world.goldens * 3
    world.push({"tau": '{"chat": 2.5}', "golden_tau": "2.5"})
    world.boot(canary=CanaryParams(period_s=1e-6), probation=Probation(timeout_s=60, num_prompts=6))
    world.engine.accepts, world.traffic = 2, traffic(2)
    world.loop.hooks = ReplicaHooks(recent=lambda _: world.traffic, tell=lambda event, _: world.told.append(event))
    world.tick()
    assert (world.loop.state.phase, world.loop.state.proof is not None) == (Phase.SERVING, True)
    world.tick()
    return world


@pytest.mark.slow
def test_a_pair_that_broke_is_loaded_again_and_no_draft_is_blamed(checked: World) -> None:
    checked.engine.accepts, checked.traffic = 0, traffic(0)
    checked.tick()
    assert (checked.counts["broken_pairs"], checked.told) == (1, [PAIR_BROKE])
    assert "lost 100% on canary prompts, 100% on traffic" in (checked.loop.state.fault or "")
    assert checked.loop.state.phase is Phase.UNPROVEN
    checked.tick()  # it fails its probation too
    checked.require(None)
    assert (checked.loop.state.refused, checked.champion()) == ({}, 1)
    checked.engine.accepts = 2
    checked.make_due()
    checked.tick()
    checked.require(1)
    assert checked.loop.state.fault is None


def test_a_draft_that_changes_the_output_while_it_serves_is_loaded_again(checked: World) -> None:
    checked.engine.accepts = None
    checked.faults["1"] = "corrupts"
    checked.tick()
    assert (checked.told, checked.loop.state.phase) == ([PAIR_BROKE], Phase.UNPROVEN)
    assert "gives another output" in (checked.loop.state.fault or "")


def test_a_target_that_changed_its_output_is_told_of_and_no_draft_is_blamed(checked: World) -> None:
    checked.loop._prompts._goldens = misquote(checked.goldens)
    checked.tick()
    checked.require(1)
    assert (checked.told, checked.loop.state.refused, checked.loop.state.postponed) == ([TARGET_DIFFERS], {}, {})
    assert checked.loop.state.fault == "the target alone parts from its reference on a canary prompt"


def test_an_operator_who_switches_off_during_a_canary_gets_it_at_once(checked: World) -> None:
    checked.faults["1"] = "hangs"
    num_asked = checked.engine.num_asked
    checked.runner.run(switch_off(checked, lambda: checked.engine.num_asked > num_asked))
    assert (checked.loop.state.phase, checked.counts["called_off"]) == (Phase.SERVING, 1)


def test_canary_prompts_that_are_not_answered_in_time_say_nothing(checked: World) -> None:
    checked.faults["1"] = "hangs"
    checked.configure(canary=CanaryParams(period_s=1e-6, timeout_s=0.1))
    checked.tick()
    checked.require(1, canaries_undecided=1, canaries=0)
    assert checked.loop.state.postponed == {}


def test_a_served_draft_that_was_quarantined_elsewhere_is_retired(running: World) -> None:
    running.registry.revert("draft", 1, "worse on live traffic")
    running.tick()
    running.require(None)
    assert running.loop.state.fallback == "draft 1 was quarantined"
    assert (running.remembered().good, running.remembered().unreported) == ((), ())


@pytest.mark.slow
def test_the_loop_outlives_every_fault_and_counts_it(running: World) -> None:
    running.push(fault="crashes")

    async def run() -> None:
        running.configure(poll_s=0.01, probation=Probation(timeout_s=0.1))
        task = asyncio.create_task(running.loop.run())
        async with asyncio.timeout(60):
            while running.counts["errors"] < 3:
                await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    running.runner.run(run())
    assert running.counts["postponed"] >= 3


@pytest.mark.slow
def test_the_first_look_ends_with_a_tested_draft_or_once_a_test_that_hangs_is_given_up(world: World) -> None:
    world.push(fault="hangs")
    world.boot(probation=Probation(timeout_s=1.0))

    async def run() -> Phase:
        task = asyncio.create_task(world.loop.run())
        async with asyncio.timeout(60):
            while world.engine.num_asked == 0:
                await asyncio.sleep(0.01)
            phase, looked = world.loop.state.phase, world.loop.has_looked
            while not world.loop.has_looked:
                await asyncio.sleep(0.01)
        task.cancel()
        assert not looked
        return phase

    assert world.runner.run(run()) is Phase.PROVING
    assert (world.serving(), world.loop.state.postponed.keys()) == (1, {label(world.registry.get("draft", 1))})


@pytest.mark.parametrize("content", ["", "{}x", '{"good": 1}'])
def test_a_damaged_state_is_counted_and_as_none(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path, counts = tmp_path / "state.json", Counter[str]()
    assert (recall(path, counts), counts) == (DraftHistory(), {})
    path.write_text(content)
    assert (recall(path, counts), counts) == (DraftHistory(), {"errors": 1})
    assert f"{path} is not a memory of drafts" in caplog.text
