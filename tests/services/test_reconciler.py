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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.artifacts import write_manifest
from infra.cache import remove_unheld
from infra.database import Database
from infra.events import PAIR_BROKE, TARGET_DIFFERS
from infra.processes import free_port
from infra.registry import CHAMPION, Registry
from infra.settings import Settings
from infra.status import Phase
from infra.store import StoreUnavailable
from infra.versions import ForeignVersion, Version, is_quarantined, label
from models import catalog
from models.core.drafting.draft_families import family_named
from models.core.drafting.draft_format import WEIGHTS
from models.core.drafting.proposal import Proposal
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.canary import Params as CanaryParams
from models.core.evaluation.golden import Golden
from models.engines import Completion, NotSwitchable, Sampling
from models.engines.torch import Params, TorchEngine
from models.params import BaseParams
from models.serving import Probation, Serve
from models.targets import describe
from models.verify import Verified, emit
from services.config import ServiceConfig
from services.drafts import (
    MAX_FAILED_STARTS,
    MAX_WAIT_S,
    DraftHistory,
    DraftSource,
    Loaded,
    recall,
    remember,
    start_engine,
)
from services.reconciler import FIRST, LAST, Reconciler, ReplicaHooks
from services.swap import Fetch
from tests.conftest import make_draft
from tests.models.drafts.tiny import save_tiny
from tests.object_store import Bucket
from tests.tags import draft_tags

THRESHOLD = 0.01
PROMPTS = ([5, 6, 7, 8], [40, 41, 42])
Spoil = Callable[[dict[str, Tensor]], None]


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

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        request_id: str,
        on_first_token: Callable[[], None] | None = None,
    ) -> Completion:
        assert request_id.startswith("golden-")
        assert on_first_token is not None

        def read() -> None:
            self.num_reading -= 1
            on_first_token()

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
            if fault == "stumbles" and request_id.endswith("-1"):
                raise RuntimeError("the engine stumbled")
            completion = await super().generate(prompt_ids, sampling, request_id, read)
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
        self.home, self.target, self.goldens = home, target, goldens
        self.registry = Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts", Database(home / "queries.db"))
        self.config = ServiceConfig(
            target_dir=target,
            settings=Settings(home=home),
            serve=Serve(min_swap_interval_s=0, probation=Probation(timeout_s=60)),
        )
        self.card = describe(target)
        self.source = DraftSource(self.registry, self.config.settings.cache, self.card, Params().num_draft_tokens)
        self.engine: FaultyEngine
        self.faults: dict[str, str] = {}
        self.unstartable: dict[str, Exception] = {}  # by version, "" for the target alone
        self.loop: Reconciler
        self.counts: Counter[str] = Counter()
        self.runner = asyncio.Runner()  # one event loop, as a replica has
        self.traffic: list[AcceptanceCount] = []
        self.told: list[str] = []

    def push(
        self,
        tags: dict[str, str] | None = None,
        *,
        fault: str = "",
        spoil: Spoil | None = None,
        vocab_size: int = 64,
        family: str = "eagle3",
        change: Callable[[Path], object] | None = None,
    ) -> Version:
        """Register a draft and make it the champion."""
        number = len(list(self.home.glob("made/*")))
        directory = self.home / "made" / str(number)
        directory.mkdir(parents=True)
        if family == "eagle3":
            make_draft(self.target, directory, seed=number, vocab_size=vocab_size)
        else:
            save_tiny(family_named(family), self.target, directory, seed=number)
        if spoil is not None:
            tensors = load_file(directory / WEIGHTS)
            spoil(tensors)
            save_file(tensors, directory / WEIGHTS)
            write_manifest(directory)
        if change is not None:
            change(directory)
            write_manifest(directory)
        lineage = draft_tags() | {
            "target_sha256": self.card.sha256,
            "tokenizer_sha256": self.card.tokenizer_sha256,
            "vocab_size": str(self.card.vocab_size),
            "golden_tau": "1.0",
        }
        version = self.registry.register("draft", directory, lineage | (tags or {}))
        self.registry.promote("draft", version.number)
        if fault:
            self.faults[str(version.number)] = fault
        return version

    def boot(self, **changes: object) -> int | None:
        """Start an engine and a loop; return the draft that it started with."""
        serve = self.config.serve.model_copy(update=changes)
        self.config = self.config.model_copy(update={"serve": serve})
        self.counts = Counter()
        self.engine, boot, memory = self.runner.run(
            start_engine(self.start, self.source, self.config.memory, self.counts)
        )
        self.engine.faults, self.engine.priorities = self.faults, set()
        self.loop = Reconciler(
            self.engine, self.source, self.goldens, THRESHOLD, self.config, boot, memory, self.counts
        )
        return boot.version.number if boot else None

    def serve(self, tags: dict[str, str] | None = None, **pushed: Any) -> Version:
        """Make a draft the champion, start with it, and look once."""
        version = self.push(tags, **pushed)
        self.boot()
        self.tick()
        return version

    def configure(self, **serve: object) -> None:
        """Change the running loop's settings."""
        changed = self.config.serve.model_copy(update=serve)
        self.loop._config = self.config.model_copy(update={"serve": changed})

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

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.run(self.loop.tick())

    def make_due(self) -> None:
        """Let the waits of the postponed drafts be over."""
        assert self.loop.state.postponed
        state = self.loop.state
        due = {name: one._replace(due_s=0.0) for name, one in state.postponed.items()}
        self.loop.state = replace(state, postponed=due)

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
    assert (world.serving(), world.engine.speculating) == (1, True)
    assert world.loop.state.proof is not None
    return world


def test_a_new_champion_is_swapped_in_and_remembered(running: World) -> None:
    running.push()
    running.tick(2)
    assert (running.serving(), running.counts["swaps"]) == (2, 1)
    assert running.loop.state.proof is not None
    assert (running.loop.state.proof.weight_error, running.loop.state.proof.promised_tau) == (0.0, 1.0)
    assert [version.number for version in recall(running.config.memory, Counter()).good] == [2, 1]


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


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight"]


def make_nan(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "fault", "tags", "reason"),
    [
        (drop, "", {}, "fc.weight is missing"),
        (make_nan, "", {}, "fc.weight holds NaN"),
        (None, "refuses", {}, "draft mismatch"),
        (None, "mangles", {}, "fc.weight of the loaded draft differs"),
        (None, "corrupts", {}, "another output"),
        (None, "", {"golden_tau": "3.9"}, "promised 3.900"),
        (None, "", {"golden_tau": ""}, "tag golden_tau is empty"),
    ],
    ids=["file", "nan", "swap", "weights", "output", "acceptance", "no figure"],
)
def test_a_bad_draft_is_taken_back_quarantined_and_never_tried_again(
    running: World, spoil: Spoil | None, fault: str, tags: dict[str, str], reason: str
) -> None:
    bad = running.push(tags, fault=fault, spoil=spoil)
    running.tick(3)
    assert running.serving() == 1
    assert running.engine.speculating
    assert running.counts["refused"] == 1
    assert reason in running.loop.state.refused[label(bad)]
    assert reason in running.registry.get("draft", bad.number).tags["quarantined"]
    assert running.champion() == 1
    assert recall(running.config.memory, Counter()).refused == {label(bad): running.loop.state.refused[label(bad)]}


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


def of_a_newer_release(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["redraft"]["family"] = "of_a_newer_release"
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pushed", "named"),
    [
        *(({"tags": {tag: "5"}}, tag) for tag in ("target_sha256", "tokenizer_sha256", "vocab_size")),
        ({"change": of_a_newer_release}, "is of family 'of_a_newer_release'"),
    ],
)
def test_a_draft_for_another_target_or_of_a_family_that_a_newer_release_has_is_left_alone(
    running: World, pushed: dict[str, Any], named: str
) -> None:
    other = running.push(**pushed)
    running.tick(3)
    assert (running.serving(), running.counts["unfit"], running.champion()) == (1, 1, other.number)
    assert named in running.loop.state.refused[label(other)]
    assert recall(running.config.memory, Counter()).refused == {}


def test_files_that_are_not_what_was_registered_are_refused(running: World) -> None:
    bad = running.push()
    stored = max(running.home.glob(f"artifacts/**/{WEIGHTS}"), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    running.tick()
    assert running.serving() == 1
    assert "sha256" in running.loop.state.refused[label(bad)]


@pytest.mark.parametrize("found", ["elsewhere", "by an operator", "on probation"])
def test_after_a_quarantine_the_replica_answers_on_where_the_draft_before_has_another_shape(
    running: World, found: str
) -> None:
    bad = running.serve({"golden_tau": "3.9"} if found == "on probation" else None, vocab_size=32)
    if found == "elsewhere":
        running.registry.revert("draft", bad.number, "worse on live traffic")
    if found == "by an operator":
        running.registry.roll_back("draft", "worse on live traffic")
    running.tick(3)
    assert running.is_quarantined(bad)
    assert (running.champion(), running.serving(), running.engine.speculating) == (1, None, False)
    assert running.loop.state.replacement is None
    told = running.loop.state.refused
    assert any("draft_vocab_size" in why and "next start" in why for why in told.values()), told
    assert running.boot() == 1
    running.tick()
    assert (running.serving(), running.engine.speculating) == (1, True)


def test_going_back_without_a_quarantine_asks_for_a_new_replica_as_any_champion_does(running: World) -> None:
    running.serve(vocab_size=32)
    running.registry.roll_back("draft")
    running.tick()
    assert "draft_vocab_size" in (running.loop.state.replacement or "")


def test_a_champion_that_is_promoted_after_a_quarantine_is_served_if_it_fits_and_asks_for_a_replica_if_not(
    running: World,
) -> None:
    bad = running.serve(vocab_size=32)
    running.registry.revert("draft", bad.number, "worse on live traffic")
    running.tick(2)
    running.push(vocab_size=32)
    running.tick()
    assert (running.serving(), running.engine.speculating, running.loop.state.replacement) == (3, True, None)
    running.push()
    running.tick()
    assert "draft_vocab_size" in (running.loop.state.replacement or "")


def test_a_replica_without_a_draft_answers_on_where_a_quarantine_brings_another_champion(running: World) -> None:
    running.push(spoil=lambda tensors: tensors.pop("fc.weight"))
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
    assert running.loop.state.replacement == (
        "draft 2 drafts 5 tokens a step, this replica 3: needs a replica of its own"
    )
    running.boot()
    assert running.engine.params.num_draft_tokens == 5
    running.tick(2)
    assert (running.serving(), running.loop.state.replacement) == (2, None)
    running.push()  # of before the tag was written: not compared
    running.tick()
    assert (running.serving(), running.loop.state.replacement) == (3, None)
    running.push({"num_draft_tokens": "5"})
    running.tick()
    assert running.serving() == 4


@pytest.mark.slow
def test_a_good_draft_of_another_k_is_not_fallen_back_to(world: World) -> None:
    for k in (3, 5):
        world.serve({"num_draft_tokens": str(k)})
    assert [version.number for version in recall(world.config.memory, Counter()).good] == [2, 1]
    world.faults["2"] = "refuses"
    world.push({"num_draft_tokens": "5"}, fault="corrupts")
    world.tick()
    assert (world.serving(), world.engine.speculating, world.loop.state.fallback) == (None, False, "no good draft")


def test_a_configured_k_of_0_stays(world: World) -> None:
    version = world.push({"num_draft_tokens": "5"})
    assert world.source.served_k(version) == 5
    assert DraftSource(world.registry, world.config.settings.cache, world.card, 0).served_k(version) == 0


def test_an_engine_without_a_draft_asks_to_be_replaced_when_one_comes(world: World) -> None:
    assert world.boot() is None
    world.tick()
    assert (world.loop.state.replacement, world.loop.state.fallback) == (None, "no draft")
    world.push()
    world.tick()
    assert "started without one" in (world.loop.state.replacement or "")


@pytest.mark.slow
def test_a_draft_that_the_engine_fails_to_take_is_tried_again_after_waits_that_double(running: World) -> None:
    running.boot(probation=Probation(timeout_s=1000))
    running.tick()
    version = running.push(fault="crashes")
    for num_attempts, wait_s in ((1, 1000.0), (2, 2000.0), (3, MAX_WAIT_S)):
        with pytest.raises(RuntimeError, match="did not answer"):
            running.tick()
        assert running.serving() == 1
        postponed = running.loop.state.postponed[label(version)]
        assert (postponed.num_attempts, postponed.wait_s) == (num_attempts, wait_s)
        running.tick()  # too early
        assert running.counts["postponed"] == num_attempts
        running.make_due()
    assert label(version) not in running.loop.state.refused
    running.faults.clear()
    running.tick()
    assert (running.serving(), running.loop.state.postponed) == (2, {})
    assert "quarantined" not in running.registry.get("draft", version.number).tags


@pytest.mark.slow
def test_a_probation_that_takes_too_long_is_ended_and_tried_again_later(running: World) -> None:
    version = running.push(fault="hangs")
    running.configure(probation=Probation(timeout_s=4))
    running.tick(2)
    assert (running.serving(), running.counts["postponed"]) == (1, 1)
    told = running.loop.state.postponed[label(version)].describe(time.monotonic())
    assert "took more than 4 s; the next comes in " in told
    running.faults.clear()
    running.configure(probation=Probation(timeout_s=60))
    running.make_due()
    running.tick()
    assert (running.serving(), running.loop.state.postponed) == (2, {})


@pytest.mark.slow
def test_a_boot_draft_that_can_not_be_judged_goes_on_serving_and_holds_up_no_other_champion(world: World) -> None:
    boot = world.push(fault="hangs")
    world.boot()
    world.configure(probation=Probation(timeout_s=4))
    world.tick(2)
    assert (world.serving(), world.engine.speculating, world.loop.state.proof) == (1, True, None)
    waits = world.loop.state.postponed[label(boot)]
    assert waits.num_attempts == 1
    world.loop.state = replace(world.loop.state, postponed={label(boot): waits._replace(due_s=waits.due_s + 3600)})
    world.configure(probation=Probation(timeout_s=60))
    champion = world.push(fault="crashes")
    with pytest.raises(RuntimeError, match="did not answer"):
        world.tick()
    world.tick()  # too early for either
    assert (world.serving(), set(world.loop.state.postponed)) == (1, {label(boot), label(champion)})
    world.faults.clear()
    world.push()
    world.tick(2)
    assert (world.serving(), world.loop.state.postponed) == (3, {})


@pytest.fixture
def undecided(world: World) -> World:
    """A replica whose boot draft could not be judged, because the engine stumbled."""
    boot = world.push(fault="stumbles")
    world.boot()
    with pytest.raises(RuntimeError, match="stumbled"):
        world.tick()
    world.tick()
    assert (world.loop.state.postponed[label(boot)].reason, world.loop.state.proof) == ("RuntimeError", None)
    return world


def test_a_postponed_boot_draft_is_proven_when_its_wait_is_over(undecided: World) -> None:
    undecided.faults.clear()
    undecided.make_due()
    undecided.tick()
    assert undecided.loop.state.postponed == {}
    assert undecided.loop.state.proof is not None


def test_a_postponed_boot_draft_that_turns_out_bad_is_refused(undecided: World) -> None:
    (boot,) = undecided.loop.state.postponed
    undecided.faults["1"] = "corrupts"
    undecided.make_due()
    undecided.tick()
    assert undecided.loop.state.postponed == {}
    assert (undecided.serving(), "another output" in undecided.loop.state.refused[boot]) == (None, True)


MACHINE = [RuntimeError("Engine core initialization failed"), OSError("address in use"), MemoryError("no memory")]


@pytest.mark.slow
@pytest.mark.parametrize("failure", MACHINE, ids=lambda failure: type(failure).__name__)
def test_a_draft_that_the_engine_did_not_start_with_waits_and_is_then_served(
    running: World, failure: Exception
) -> None:
    version = running.push()
    running.unstartable["2"] = failure
    assert (running.boot(), running.counts["postponed"]) == (1, 1)
    running.tick()
    assert (running.serving(), running.champion(), running.loop.state.refused) == (1, 2, {})
    assert "did not start with it" in running.loop.state.postponed[label(version)].describe(time.monotonic())
    running.make_due()
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)
    assert recall(running.config.memory, Counter()).failed_starts == {}


def test_a_draft_that_only_the_target_starts_without_asks_for_a_new_replica_after_its_wait(world: World) -> None:
    version = world.push()
    world.unstartable["1"] = MACHINE[0]
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
    version = running.push()
    before = recall(running.config.memory, Counter())
    running.unstartable = {"2": MACHINE[0], "1": MACHINE[0], "": RuntimeError("the target does not start")}
    for _ in range(MAX_FAILED_STARTS + 1):
        with pytest.raises(RuntimeError, match="the target does not start"):
            running.boot()
    assert recall(running.config.memory, Counter()) == before
    running.unstartable.clear()
    assert running.boot() == 2
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


def test_when_every_draft_fails_and_the_target_starts_none_is_refused(running: World) -> None:
    version = running.push()
    running.unstartable = {"1": MACHINE[2], "2": MACHINE[2]}
    for _ in range(MAX_FAILED_STARTS + 1):
        assert running.boot() is None
        running.tick()
    assert (running.loop.state.refused, running.champion(), running.is_quarantined(version)) == ({}, 2, False)


@pytest.mark.slow
def test_a_draft_that_alone_fails_start_after_start_is_refused_for_everyone(running: World) -> None:
    version = running.push()
    running.unstartable["2"] = MACHINE[0]
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


def test_a_boot_draft_is_not_blamed_for_an_output_that_the_target_alone_gives_too(world: World) -> None:
    world.goldens = misquote(world.goldens)
    version = world.serve()
    assert (world.serving(), world.engine.speculating, world.loop.state.proof) == (1, True, None)
    assert (world.loop.state.refused, world.is_quarantined(version)) == ({}, False)
    reason = world.loop.state.postponed[label(version)].reason
    assert reason == "the target alone parts from its reference too, on 1 golden prompts"


@pytest.mark.slow
def test_a_champion_is_not_blamed_for_an_output_that_the_target_alone_gives_too(running: World) -> None:
    running.loop._prompts._goldens = misquote(running.goldens)
    version = running.push()
    running.tick()
    assert (running.serving(), running.engine.speculating, running.champion()) == (1, True, 2)
    assert (running.loop.state.refused, set(running.loop.state.postponed)) == ({}, {label(version)})
    running.loop._prompts._goldens = running.goldens
    running.make_due()
    running.tick()
    assert (running.serving(), running.is_quarantined(version)) == (2, False)


def test_a_draft_is_blamed_for_its_own_output_though_the_target_fails_elsewhere(running: World) -> None:
    running.loop._prompts._goldens = misquote(running.goldens)
    version = running.push(fault="corrupts")
    running.tick()
    assert (running.serving(), running.engine.speculating) == (1, True)
    assert running.loop.state.refused[label(version)].startswith("golden prompt 1 gave another output")


@pytest.mark.slow
def test_a_quarantine_that_somebody_cleared_stays_cleared_and_the_draft_is_tried_again(running: World) -> None:
    version = running.push(fault="corrupts")
    running.tick()
    assert running.is_quarantined(version)
    running.faults.clear()
    running.clear(version)
    running.tick()
    assert (running.serving(), running.champion(), running.is_quarantined(version)) == (2, 2, False)
    assert recall(running.config.memory, Counter()).refused == {}


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


@pytest.mark.slow
def test_a_draft_that_fails_again_after_it_was_cleared_is_quarantined_again(running: World) -> None:
    version = running.push(fault="corrupts")
    running.tick()
    running.clear(version)
    running.tick()
    assert (running.serving(), running.champion(), running.is_quarantined(version)) == (1, 1, True)


def test_a_refusal_that_the_registry_could_not_be_told_of_is_reported_after_a_restart(running: World) -> None:
    version = running.push()
    remember(running.config.memory, recall(running.config.memory, Counter()).with_refused(version, "bad"), Counter())
    running.boot()
    running.tick()
    assert (running.serving(), running.champion(), running.is_quarantined(version)) == (1, 1, True)
    assert recall(running.config.memory, Counter()).unreported == ()


@pytest.mark.slow
def test_without_a_good_draft_speculation_goes_off_until_one_comes(world: World) -> None:
    world.serve({"golden_tau": "3.9"})
    assert (world.serving(), world.engine.speculating, world.champion()) == (None, False, None)
    assert world.loop.state.fallback == "no good draft"
    world.push()
    world.tick()
    assert (world.serving(), world.engine.speculating, world.loop.state.fallback) == (2, True, None)


def test_a_bad_boot_draft_gives_way_to_the_last_good_one(running: World) -> None:
    running.push({"golden_tau": "3.9"})
    assert running.boot() == 2
    running.tick(2)
    assert (running.serving(), running.engine.speculating, running.champion()) == (1, True, 1)


def test_when_the_last_good_draft_can_not_be_put_back_speculation_goes_off(running: World) -> None:
    running.push(fault="mangles")
    running.faults["1"] = "crashes"
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.counts["errors"] == 1


@pytest.mark.slow
def test_while_the_registry_is_down_the_last_good_draft_serves_and_a_bad_one_is_reported_later(running: World) -> None:
    bad = running.push({"golden_tau": "3.9"})
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
        running.runner.run(running.loop._do(Fetch(champion)))
    assert running.serving() == 1
    with sqlite3.connect(database) as db:
        db.execute("ALTER TABLE gone RENAME TO model_versions")
    running.tick()
    assert running.champion() == 1
    assert "quarantined" in running.registry.get("draft", bad.number).tags


def test_a_replica_starts_from_the_cache_while_the_registry_is_down(running: World) -> None:
    (running.home / "mlflow.db").write_bytes(b"not a database")
    database = Database(running.home / "queries.db")
    running.registry = Registry(f"sqlite:///{running.home}/mlflow.db", running.home / "artifacts", database)
    running.source = DraftSource(
        running.registry, running.config.settings.cache, running.card, Params().num_draft_tokens
    )
    assert (running.boot(), running.counts["registry_unavailable"]) == (1, 1)


def move_into(bucket: Bucket, running: World, cache: str = "cache") -> None:
    """Let the world's next versions lie in an object store, and its replicas have a cache of their own."""
    running.registry = Registry(
        f"sqlite:///{running.home}/mlflow.db",
        running.home / "artifacts",
        Database(running.home / "queries.db"),
        bucket.address,
    )
    settings = running.config.settings.model_copy(update={"cache": running.home / cache})
    running.config = running.config.model_copy(update={"settings": settings})
    running.source = DraftSource(running.registry, settings.cache, running.card, Params().num_draft_tokens)


def leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the object store be where nobody answers."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port('127.0.0.1')}")


@pytest.mark.slow
def test_a_draft_whose_object_store_is_gone_waits_and_the_last_good_one_serves(
    running: World, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_into(bucket, running)
    running.boot()
    running.tick()
    pushed = running.push()
    with monkeypatch.context() as gone:
        leave(gone)
        move_into(bucket, running)
        running.loop._source = running.source
        running.tick(2)
        assert (running.serving(), running.champion()) == (1, pushed.number)
        assert running.counts["artifacts_unavailable"] == 1
        assert not running.is_quarantined(pushed)
        told = running.loop.state.postponed[label(pushed)].describe(time.monotonic())
        assert re.match(
            r"attempt 1 failed: reading s3://.*manifest\.json: Could not connect .* the next comes in", told
        )
    running.make_due()
    running.tick()
    assert running.serving() == pushed.number
    assert running.counts["errors"] == 0


@pytest.mark.slow
def test_a_replica_starts_from_the_cache_while_the_object_store_is_gone(
    running: World, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_into(bucket, running)
    good = running.push()
    running.boot()
    running.tick()
    unseen = running.push()
    leave(monkeypatch)
    assert (running.boot(), running.counts["artifacts_unavailable"]) == (good.number, 1)
    running.tick()
    assert running.serving() == good.number
    assert label(unseen) in running.loop.state.postponed
    assert (running.home / "service-state.json").is_file()


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
    with sqlite3.connect(running.home / "queries.db") as db:
        db.execute("ALTER TABLE champions RENAME TO gone")
    running.runner.run(running.loop.look())
    assert (running.serving(), running.counts["registry_unavailable"]) == (1, 1)
    assert (running.boot(), running.counts["registry_unavailable"]) == (1, 1)
    with sqlite3.connect(running.home / "queries.db") as db:
        db.execute("ALTER TABLE gone RENAME TO champions")
    running.tick()
    assert (running.serving(), running.counts["swaps"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "value"),
    [("tau", "{"), ("vocab_size", "many"), ("golden_tau", "nan"), ("num_draft_tokens", "0"), ("parent", "the first")],
)
def test_a_champion_with_a_tag_changed_by_hand_is_left_alone_and_named(running: World, tag: str, value: str) -> None:
    damaged = running.push()
    running.registry.store.client.set_model_version_tag("draft", str(damaged.number), tag, value)
    with pytest.raises(ForeignVersion, match=f"draft {damaged.number}: tag {tag} is '{value}'"):
        running.tick()
    assert (running.serving(), running.engine.speculating) == (1, True)
    assert not is_quarantined(running.registry.get("draft", damaged.number))
    assert (running.boot(), running.counts["errors"]) == (1, 1)


@pytest.mark.slow
def test_a_draft_that_there_is_no_memory_for_is_not_loaded_and_comes_when_there_is(world: World) -> None:
    world.push()
    world.boot(min_free_memory_gib=1e6)
    world.tick()
    newer = world.push(fault="corrupts")  # were it loaded, its probation would refuse it
    world.tick(2)
    assert (world.serving(), world.engine.speculating) == (1, True)
    assert (world.counts["swaps"], world.counts["postponed"], world.counts["reverts"]) == (0, 1, 0)
    assert "GiB of memory are free, a swap wants 1000000.00" in world.loop.state.postponed[label(newer)].reason
    assert (world.loop.state.refused, world.champion()) == ({}, newer.number)
    world.faults.clear()
    world.configure(min_free_memory_gib=0.0)
    world.make_due()
    world.tick()
    assert (world.serving(), world.counts["swaps"], world.loop.state.postponed) == (newer.number, 1, {})


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
        self.fetching, self.may_go = threading.Event(), threading.Event()
        self.fetched = threading.Event()

    def fetch(self, version: Version) -> Path:
        self.fetching.set()
        assert self.may_go.wait(60)
        path = super().fetch(version)
        self.fetched.set()
        return path


def make_slow(world: World) -> SlowSource:
    slow = SlowSource(world.registry, world.config.settings.cache, world.card, Params().num_draft_tokens)
    world.source = world.loop._source = slow
    return slow


@pytest.mark.slow
@pytest.mark.parametrize("is_put_back", [False, True])
def test_an_operator_who_switches_off_while_a_draft_is_fetched_gets_it_at_once(
    running: World, is_put_back: bool
) -> None:
    running.push({"golden_tau": "3.9"} if is_put_back else None)
    if is_put_back:
        running.boot()
    slow = make_slow(running)
    running.runner.run(switch_off(running, slow.fetching.is_set, slow.may_go.set))
    assert (running.serving(), running.loop.state.speculates, running.counts["swaps"]) == (1, False, 0)


@pytest.mark.slow
def test_a_draft_that_is_not_put_back_in_time_leaves_speculation_off_until_it_is(running: World) -> None:
    running.push({"golden_tau": "3.9"})
    running.boot(probation=Probation(timeout_s=60, put_back_s=0.2))
    slow = make_slow(running)
    running.tick()
    assert (running.engine.speculating, running.counts["late"]) == (False, 1)
    assert running.loop.state.fallback == "the last good draft is being put back"
    running.loop._source = DraftSource(running.registry, running.config.settings.cache, running.card, 3)
    slow.may_go.set()  # the fetch that went on holds the folder
    assert slow.fetched.wait(60)
    running.configure(probation=Probation(timeout_s=60))
    running.tick(2)
    assert (running.serving(), running.engine.speculating, running.loop.state.fallback) == (1, True, None)


def test_what_checks_a_draft_goes_before_traffic_and_what_checks_it_later_after_it(checked: World) -> None:
    assert checked.engine.priorities == {FIRST}
    checked.engine.priorities.clear()
    checked.tick()
    assert (checked.engine.priorities, checked.counts["canaries"]) == ({LAST}, 1)


def traffic(accepted: int) -> list[AcceptanceCount]:
    """Return the last requests of draft 1, which was promised a τ of 2.5."""
    return [
        AcceptanceCount(number, "chat", steps=9, drafted=27, accepted=9 * accepted)
        for number in range(CanaryParams().num_requests)
    ]


@pytest.fixture
def checked(world: World) -> World:
    """A replica that has proven a draft and is about to ask it the canary prompts."""
    world.goldens = world.goldens * 3
    world.push({"tau": '{"chat": 2.5}', "golden_tau": "2.5"})
    canary = CanaryParams(period_s=1e-6)
    world.boot(canary=canary, probation=Probation(timeout_s=60, num_prompts=6))
    world.engine.accepts = 2
    world.traffic = traffic(2)
    world.loop.hooks = ReplicaHooks(
        recent=lambda draft: world.traffic, tell=lambda event, text: world.told.append(event)
    )
    world.tick()
    assert (world.loop.state.phase, world.loop.state.proof is not None) == (Phase.SERVING, True)
    world.tick()
    return world


@pytest.mark.slow
def test_canary_prompts_or_traffic_that_fall_alone_change_nothing(checked: World) -> None:
    checked.tick()
    assert (checked.counts["canaries"], checked.counts["canaries_fell"]) == (1, 0)
    checked.traffic = traffic(0)
    checked.tick()
    assert (checked.counts["canaries"], checked.counts["canaries_fell"]) == (2, 0)
    checked.engine.accepts, checked.traffic = 0, traffic(2)
    checked.tick()
    assert (checked.counts["canaries"], checked.counts["canaries_fell"]) == (3, 1)
    assert (checked.serving(), checked.engine.speculating) == (1, True)
    assert (checked.loop.state.fault, checked.told) == (None, [])


@pytest.mark.slow
def test_a_pair_that_broke_is_loaded_again_and_no_draft_is_blamed(checked: World) -> None:
    checked.engine.accepts, checked.traffic = 0, traffic(0)
    checked.tick()
    assert (checked.counts["broken_pairs"], checked.told) == (1, [PAIR_BROKE])
    assert "lost 100% on canary prompts, 100% on traffic" in (checked.loop.state.fault or "")
    assert checked.loop.state.phase is Phase.UNPROVEN
    checked.tick()  # it fails its probation too
    assert (checked.serving(), checked.engine.speculating) == (None, False)
    assert (checked.loop.state.refused, checked.champion()) == ({}, 1)
    checked.engine.accepts = 2
    checked.make_due()
    checked.tick()
    assert (checked.serving(), checked.engine.speculating, checked.loop.state.fault) == (1, True, None)


def test_a_draft_that_changes_the_output_while_it_serves_is_loaded_again(checked: World) -> None:
    checked.engine.accepts = None
    checked.faults["1"] = "corrupts"
    checked.tick()
    assert (checked.told, checked.loop.state.phase) == ([PAIR_BROKE], Phase.UNPROVEN)
    assert "gives another output" in (checked.loop.state.fault or "")


def test_a_target_that_changed_its_output_is_told_of_and_no_draft_is_blamed(checked: World) -> None:
    checked.loop._prompts._goldens = misquote(checked.goldens)
    checked.tick()
    assert (checked.serving(), checked.engine.speculating, checked.told) == (1, True, [TARGET_DIFFERS])
    assert (checked.loop.state.refused, checked.loop.state.postponed) == ({}, {})
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
    assert (checked.counts["canaries_undecided"], checked.counts["canaries"]) == (1, 0)
    assert (checked.serving(), checked.engine.speculating, checked.loop.state.postponed) == (1, True, {})


def test_a_served_draft_that_was_quarantined_elsewhere_is_retired(running: World) -> None:
    running.registry.revert("draft", 1, "worse on live traffic")
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.loop.state.fallback == "draft 1 was quarantined"
    assert recall(running.config.memory, Counter()).good == ()


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
def test_a_damaged_state_is_counted_and_as_empty_as_a_missing_one(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, counts = tmp_path / "state.json", Counter[str]()
    assert (recall(path, counts), counts) == (DraftHistory(), {})
    path.write_text(content)
    assert (recall(path, counts), counts) == (DraftHistory(), {"errors": 1})
    assert f"{path} is not a memory of drafts" in caplog.text


def test_a_state_survives_writing(world: World) -> None:
    state = DraftHistory().with_good(world.push()).with_refused(world.push(), "bad")
    remember(world.config.memory, state, Counter())
    assert recall(world.config.memory, Counter()) == state
    assert state.with_refused(state.good[0], "too").good == ()
    assert list(world.home.glob(".state*")) == []
