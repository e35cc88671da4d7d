"""The loop's decisions against a real registry. The engine here is a stand-in with the engine's own contract: drafts are
JSON files that say how the engine would behave with them; the real one is driven in test_service.py."""

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import staged
from infra.registry import LINEAGE_TAGS, Registry, RegistryUnavailable, Version
from models.engines.vllm import Completion, Sampling
from models.golden import Golden
from models.targets import TargetCard
from services.config import Probation, ServiceConfig
from services.drafts import DraftSource, Loaded, State, choose_boot_draft, label, read_state, write_state
from services.reconciler import MAX_ATTEMPTS, Reconciler

CARD = TargetCard(
    name="t", sha256="a" * 64, tokenizer_sha256="b" * 64, vocab_size=99, chat_template_sha256="c" * 64, hidden_size=8,
    num_layers=2,
)  # fmt: skip
GOLDENS = [Golden(prompt_ids=(1, 2), token_ids=(3, 4, 5, 6), gaps=(9.0, 9.0, 9.0, 9.0))] * 2
LINEAGE = dict.fromkeys(LINEAGE_TAGS, "") | {
    "target_sha256": CARD.sha256,
    "tokenizer_sha256": CARD.tokenizer_sha256,
    "vocab_size": "99",
    "probe_tau": "2.0",
}


def read_draft(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "draft.json").read_text())


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    draft = read_draft(directory)
    if draft.get("broken"):
        raise ValueError("tensor fc.weight is missing")
    if like is not None and draft.get("shape", 1) != read_draft(like).get("shape", 1):
        raise ValueError("fc.weight has another shape")


class JsonEngine:
    """Keeps the engine's contract; what a draft file says is how generation goes while it is loaded."""

    def __init__(self, draft: Path | None) -> None:
        self.draft = read_draft(draft) if draft else {}
        self.speculating = draft is not None
        self.loads: list[str] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        assert request_id.startswith("probe-")
        if self.draft.get("hangs"):
            await asyncio.sleep(60)
        token_ids = (3, 4, 5, 7) if self.draft.get("corrupts") else (3, 4, 5, 6)
        accepted = self.draft.get("accepts", 1)
        return Completion(
            request_id=request_id, prompt_ids=tuple(prompt_ids), token_ids=token_ids[: sampling.max_tokens],
            drafted=(3, 3) if self.speculating else (), accepted=(accepted,) * 2 if self.speculating else (),
            drafted_ids=((1, 2, 3),) * 2 if self.speculating else (), finish_reason="length", first_token_ms=1.0,
            per_token_ms=1.0, draft_version="", speculating=self.speculating,
        )  # fmt: skip

    async def swap_draft(self, directory: Path, version: str) -> float:
        draft = read_draft(directory)
        if draft.get("swap_refused"):
            raise ValueError("draft mismatch")
        if draft.get("crashes"):
            raise RuntimeError("the worker did not answer")
        self.draft = draft
        self.loads.append(version)
        return 20.0

    async def check_draft(self, directory: Path) -> float:
        if self.draft.get("mangled"):
            raise ValueError("midlayer.mlp is off by 0.9")
        return 0.001

    async def set_speculation(self, on: bool) -> None:
        self.speculating = on


class World:
    """One registry, and replicas over it that can be restarted."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.registry = Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts")
        self.config = ServiceConfig(
            target_dir=home, registry_uri="unused", artifact_root=home, querylog=home / "q.db", cache=home / "cache",
            state=home / "state.json", min_swap_interval_s=0, probation=Probation(timeout_s=0.5),
        )  # fmt: skip
        self.source = DraftSource(self.registry, self.config.cache, CARD, check)
        self.engine = JsonEngine(None)
        self.loop: Reconciler
        self.counts: Counter[str] = Counter()

    def push(self, tags: dict[str, str] | None = None, **draft: Any) -> Version:
        """Register a draft and make it the champion."""
        directory = self.home / "made" / str(len(list(self.home.glob("made/*"))))
        with staged(directory) as staging:
            (staging / "draft.json").write_text(json.dumps(draft | {"nonce": directory.name}))
        version = self.registry.register("draft", directory, LINEAGE | (tags or {}))
        self.registry.promote("draft", version.number)
        return version

    def boot(self, **changes: Any) -> Loaded | None:
        self.config = self.config.model_copy(update=changes)
        self.counts = Counter()
        boot, state = choose_boot_draft(self.source, read_state(self.config.state), self.counts)
        self.engine = JsonEngine(boot.directory if boot else None)
        self.loop = Reconciler(self.engine, self.source, GOLDENS, 0.1, self.config, boot, state, self.counts)
        return boot

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.loop.tick())

    def champion(self) -> int | None:
        champion = self.registry.champion("draft")
        return champion.number if champion else None

    def serving(self) -> int | None:
        return self.loop.serving.version.number if self.loop.serving else None


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("store")
    Registry(f"sqlite:///{home}/mlflow.db", home / "artifacts").versions("draft")
    return home / "mlflow.db"


@pytest.fixture
def world(store: Path, tmp_path: Path) -> World:
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    return World(tmp_path)


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
    running.push(accepts=2)
    running.tick(2)
    assert (running.serving(), running.engine.loads, running.counts["swaps"]) == (2, ["2"], 1)
    assert running.loop.proof is not None
    assert running.loop.proof.tau == 3.0
    assert [version.number for version in read_state(running.config.state).good] == [2, 1]


@pytest.mark.parametrize(
    ("draft", "tags", "reason"),
    [
        ({"broken": True}, {}, "fc.weight is missing"),
        ({"swap_refused": True}, {}, "draft mismatch"),
        ({"mangled": True}, {}, "off by 0.9"),
        ({"corrupts": True}, {}, "another output"),
        ({"accepts": 0}, {}, "promised 2.000"),
        ({}, {"probe_tau": ""}, "tag probe_tau is ''"),
        ({}, {"probe_tau": "nan"}, "wanted a number from 1"),
    ],
    ids=["file", "swap", "weights", "output", "acceptance", "no figure", "no number"],
)
def test_a_bad_draft_is_taken_back_quarantined_and_never_tried_again(
    running: World, draft: dict[str, Any], tags: dict[str, str], reason: str
) -> None:
    bad = running.push(tags, **draft)
    running.tick(3)
    assert running.serving() == 1
    assert running.engine.draft["nonce"] == "0"
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
    (stored,) = [path for path in running.home.glob("artifacts/**/draft.json") if '"nonce": "1"' in path.read_text()]
    stored.write_bytes(stored.read_bytes().replace(b"1", b"3"))
    running.tick()
    assert running.serving() == 1
    assert "sha256" in running.loop.refused[label(bad)]


def test_a_draft_of_another_shape_asks_for_a_new_replica_which_boots_with_it(running: World) -> None:
    running.push(shape=2)
    running.tick(2)
    assert running.serving() == 1
    assert "another shape" in (running.loop.replacement or "")
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


def test_a_failure_of_the_engine_is_tried_again_and_then_given_up_without_quarantine(running: World) -> None:
    version = running.push(crashes=True)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(RuntimeError, match="did not answer"):
            running.tick()
        assert running.serving() == 1
    running.tick()
    assert label(version) in running.loop.refused
    assert "quarantined" not in running.registry.get("draft", version.number).tags


def test_a_probation_that_hangs_is_ended(running: World) -> None:
    running.push(hangs=True)
    with pytest.raises(TimeoutError):
        running.tick()
    assert (running.serving(), running.engine.draft["nonce"]) == (1, "0")


def test_without_a_good_draft_speculation_goes_off_until_one_comes(world: World) -> None:
    world.push(accepts=0)
    world.boot()
    world.tick()
    assert (world.serving(), world.engine.speculating, world.champion()) == (None, False, None)
    assert world.loop.fallback == "no good draft"
    world.push(accepts=1)
    world.tick()
    assert (world.serving(), world.engine.speculating, world.loop.fallback) == (2, True, None)


def test_a_bad_boot_draft_gives_way_to_the_last_good_one(running: World) -> None:
    running.push(accepts=0)
    assert running.boot().version.number == 2  # type: ignore[union-attr]
    running.tick(2)
    assert (running.serving(), running.engine.speculating, running.champion()) == (1, True, 1)


def test_when_the_last_good_draft_can_not_be_put_back_speculation_goes_off(running: World) -> None:
    running.push(mangled=True)
    directory = running.loop.serving.directory  # type: ignore[union-attr]
    (directory / "draft.json").write_text(json.dumps({"crashes": True}))
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.counts["errors"] == 1


def test_while_the_registry_is_down_the_last_good_draft_serves_and_a_bad_one_is_reported_later(running: World) -> None:
    bad = running.push(accepts=0)
    database = running.home / "mlflow.db"
    running.source.fetch(bad)  # it is in the cache
    champion = running.source.champion()
    with sqlite3.connect(database) as db:
        db.execute("ALTER TABLE model_versions RENAME TO gone")
    with pytest.raises(RegistryUnavailable):
        running.tick()
    assert running.serving() == 1
    assert champion is not None
    with pytest.raises(RegistryUnavailable):
        asyncio.run(running.loop._follow(champion))
    assert (running.serving(), running.engine.draft["nonce"]) == (1, "0")
    with sqlite3.connect(database) as db:
        db.execute("ALTER TABLE gone RENAME TO model_versions")
    running.tick()
    assert running.champion() == 1
    assert "quarantined" in running.registry.get("draft", bad.number).tags


def test_a_replica_starts_from_the_cache_while_the_registry_is_down(running: World) -> None:
    (running.home / "mlflow.db").write_bytes(b"not a database")
    running.registry = Registry(f"sqlite:///{running.home}/mlflow.db", running.home / "artifacts")
    running.source = DraftSource(running.registry, running.config.cache, CARD, check)
    boot = running.boot()
    assert boot is not None
    assert boot.version.number == 1
    assert running.counts["registry_unavailable"] == 1


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
    assert asyncio.run(running.loop.set_speculation(False)) is False
    running.tick()
    assert (running.serving(), running.engine.speculating) == (1, False)
    assert asyncio.run(running.loop.set_speculation(True)) is True
    running.tick()
    assert (running.serving(), running.engine.speculating) == (2, True)


def test_an_operator_can_not_switch_on_what_has_no_good_draft(world: World) -> None:
    world.boot()
    assert asyncio.run(world.loop.set_speculation(True)) is False


def test_a_served_draft_that_was_quarantined_elsewhere_is_retired(running: World) -> None:
    running.registry.revert("draft", 1, "worse on live traffic")
    running.tick()
    assert (running.serving(), running.engine.speculating) == (None, False)
    assert running.loop.fallback == "draft 1 was quarantined"
    assert read_state(running.config.state).good == ()


def test_the_loop_outlives_every_fault_and_counts_it(running: World) -> None:
    running.push(crashes=True)

    async def run() -> None:
        running.loop._config = running.config.model_copy(update={"poll_s": 0.01})
        task = asyncio.create_task(running.loop.run())
        async with asyncio.timeout(10):
            while label(running.source.champion()) not in running.loop.refused:  # type: ignore[arg-type]
                await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(run())
    assert running.counts["errors"] == MAX_ATTEMPTS


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
