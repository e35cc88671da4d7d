"""Faults of a running service under load: bad drafts, a full disk, a registry, orchestrator or process that is gone."""

import itertools
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from infra.artifacts import write_manifest
from infra.champions import CHAMPION
from infra.database import BUSY_TIMEOUT_S
from infra.processes import wait_until
from infra.querylog import QueryLog
from infra.trigger_store import TriggerStore
from infra.triggers import Fallen
from models.core.drafting.draft_format import WEIGHTS
from tests.drills.load import Load
from tests.drills.machine import Clock
from tests.drills.scene import Scene, filled, require_end_without, running
from tests.drills.spoiled import BAD, Spoil
from tests.world import PROMPTS, World, ask, make_target, stream_text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# The engine's own start takes most of it.
RECOVERY_S = 150.0
DAY_S = 86_400
USUAL_S, BUSY_S = 3.0, BUSY_TIMEOUT_S + 1.0  # longer than the log's writer waits for a lock


@pytest.fixture(scope="module")
def scene(tiny_target: Path, engine: Any, loop: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("scene")
    make_target(tiny_target, home / "target", engine, loop)
    with running(home) as scene:
        yield scene


@pytest.fixture
def world(scene: Scene) -> Iterator[World]:
    """The world, which a test leaves with its first draft served and logging."""
    yield scene.world
    scene.world.registry.promote("draft", scene.world.versions[0])
    scene.world.wait_for_draft(scene.world.versions[0])


@pytest.fixture
def clock(scene: Scene) -> Iterator[Clock]:
    """The service's clock.

    Ray Serve asks no replica for its health until a clock that was set back has caught up, so what needs that comes
    before or restarts the service first.
    """
    yield scene.clock
    scene.clock.jump_to(0)


def test_f16_with_a_full_disk_under_the_query_log_rows_wait_for_room_and_no_answer_does(
    scene: Scene, world: World
) -> None:
    if not scene.has_small_disk:
        pytest.skip("mounting a small disk is not allowed here")
    assert world.status()["log"]["dropped"] == 0
    with scene.load() as load:
        with filled(world.querylog.parent):
            held = world.wait_for("a refused batch", lambda status: "full" in (status["log"]["last_error"] or ""))
        wait_for_rows(world, held)
        assert world.status()["log"]["dropped"] == 0
    assert load.ended_well(), load.outcomes
    told = b"the query log takes no rows"
    wait_until(lambda: told in (world.home / "service.log").read_bytes(), 60, None, "a warning in the log")
    wait_until(lambda: losses_are_in_the_log(world), 60, None, "the count of lost rows in the log")


def wait_for_rows(world: World, before: dict[str, Any], num_rows: int = 1) -> None:
    """Wait until more rows are written than when the service said this of itself."""
    written = before["log"]["written"] + num_rows
    world.wait_for("more rows", lambda status: status["log"]["written"] >= written)


def losses_are_in_the_log(world: World) -> bool:
    with closing(QueryLog(world.querylog)) as log:
        return log.stats().dropped == world.status()["log"]["dropped"]


def test_f17_with_a_full_disk_under_the_cache_the_last_good_draft_serves_on(scene: Scene, world: World) -> None:
    if not scene.has_small_disk:
        pytest.skip("mounting a small disk is not allowed here")
    first, _ = world.versions
    another = world.register(5)
    cache = world.home / "log" / "cache"

    def num_failed(status: dict[str, Any]) -> int:
        return sum(status["reconciler"].get(name, 0) for name in ("errors", "registry_unavailable"))

    with scene.load(num_clients=2) as load:
        with filled(cache.parent, but_bytes=96 << 10):  # for the champion's row, which lies there too; no draft fits
            before = num_failed(world.status())
            world.registry.promote("draft", another)
            status = world.wait_for("two looks that fail", lambda seen: num_failed(seen) > before + 1)
            assert (status["draft_version"], status["speculating"], status["refused"]) == (first, True, {})
            assert not list(cache.glob(f"draft/{another}-*"))
        world.wait_for_draft(another)
        assert list(cache.rglob(".staging*")) == []
    assert load.ended_well(), load.outcomes


def test_f18_with_the_query_log_locked_no_answer_waits_and_the_rows_do(scene: Scene, world: World) -> None:
    with scene.load() as load:
        wait_until(lambda: load.outcomes["ok"] > 4, 60, None, "answers")
        per_s, before = answered_per_s(load, USUAL_S), world.status()
        with closing(sqlite3.connect(world.querylog, isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            locked_per_s = answered_per_s(load, BUSY_S)
            held = world.wait_for("a refused batch", lambda status: "locked" in (status["log"]["last_error"] or ""))
            lock.execute("ROLLBACK")
        wait_for_rows(world, held)
        assert world.status()["log"]["dropped"] == before["log"]["dropped"]
    assert load.ended_well(), load.outcomes
    assert locked_per_s > per_s / 2, (locked_per_s, per_s)  # an answer that waited would take seconds
    wait_until(lambda: losses_are_in_the_log(world), 60, None, "the count of lost rows in the log")


def answered_per_s(load: Load, seconds: float) -> float:
    """Return how many requests a second end, over some seconds."""
    before, began_s = load.outcomes.total(), time.monotonic()
    time.sleep(seconds)
    return (load.outcomes.total() - before) / (time.monotonic() - began_s)


@pytest.mark.parametrize(("spoil", "before", "tags", "reason", "quarantined"), BAD.values(), ids=BAD.keys())
def test_a_bad_draft_is_refused_by_name_and_the_last_good_one_serves_on(
    scene: Scene, world: World, spoil: Spoil | None, before: bool, tags: dict[str, str], reason: str, quarantined: bool
) -> None:
    directory = world.home / "made" / f"bad-{time.monotonic_ns()}"
    shutil.copytree(world.make(1), directory)
    if spoil is not None and before:
        spoil(directory)
        write_manifest(directory)
    with scene.load(num_clients=2) as load:
        bad = world.register_files(directory, **tags)
        if spoil is not None and not before:
            spoil(max(world.home.glob(f"artifacts/**/{WEIGHTS}"), key=lambda file: file.stat().st_mtime_ns).parent)
        world.registry.promote("draft", bad)
        assert reason in world.wait_for_refusal(bad)
        good = world.versions[0]
        world.wait_for("the good one", lambda status: (status["draft_version"], status["speculating"]) == (good, True))
        told = reason if quarantined else ""
        wait_until(lambda: told in world.registry.get("draft", bad).quarantined, 60, None, "the quarantine")
    assert load.ended_well(), load.outcomes
    assert (world.registry.get("draft", bad).quarantined != "") == quarantined


def test_f2_without_its_controller_the_service_answers_as_before_and_follows_drafts(scene: Scene, world: World) -> None:
    [killed], replica = scene.named("ray::ServeController"), scene.replica()
    with scene.load(num_clients=2) as load:
        wait_until(lambda: load.outcomes["ok"] > 2, 60, None, "answers")
        os.kill(killed, signal.SIGKILL)
        world.registry.promote("draft", world.versions[1])
        world.wait_for_draft(world.versions[1])
        wait_until(lambda: scene.named("ray::ServeController") not in ([], [killed]), 60, None, "the next controller")
        before = load.outcomes["ok"]
        wait_until(lambda: load.outcomes["ok"] > before + 10, 60, None, "answers under the next controller")
        assert scene.replica() == replica
    assert load.ended_well(), load.outcomes


def test_f2_a_killed_proxy_is_back_in_seconds_and_the_replica_stays(scene: Scene, world: World) -> None:
    [killed], replica = scene.named("bin/haproxy"), scene.replica()
    with scene.load(num_clients=2) as load:
        load.wait_for_stream()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: scene.named("bin/haproxy") not in ([], [killed]), 60, None, "the next proxy")
        before = load.outcomes["ok"]
        wait_until(lambda: load.outcomes["ok"] > before + 4, 60, None, "answers through the next proxy")
        assert scene.replica() == replica
    assert load.ended_well("broken", "no answer", "no connection", "503"), load.outcomes
    assert load.outcomes["broken"] + load.outcomes["no answer"] <= load.num_clients, load.outcomes


def test_f21_what_somebody_set_by_hand_in_the_registry_and_may_not_is_put_back(scene: Scene, world: World) -> None:
    by_hand = world.registry.store.client
    ours = by_hand.get_model_version("draft", "1")
    number = by_hand.create_model_version("draft", source=ours.source, model_id=ours.tags["model_id"]).version
    with scene.load(num_clients=2) as load:
        by_hand.set_registered_model_alias("draft", CHAMPION, number)

        def is_put_back() -> bool:
            return int(by_hand.get_model_version_by_alias("draft", CHAMPION).version) == world.versions[0]

        wait_until(is_put_back, 60, None, "the alias")
        status = world.status()
        assert (status["draft_version"], status["speculating"]) == (world.versions[0], True)
    assert load.ended_well(), load.outcomes


def test_f20_without_the_orchestrator_serving_goes_on_and_a_wanted_refresh_stays(scene: Scene, world: World) -> None:
    hopeful = world.register(3, tau=json.dumps({"drift": 3.9}))
    with scene.load(num_clients=2) as load:
        world.registry.promote("draft", hopeful)
        world.wait_for_draft(hopeful)
        with world.client() as client:
            for number in range(6):
                ask(client, f"drift {number}", extra_headers={"X-Redraft-Domain": "drift"})
        events = world.wait_for("a dropped event", lambda status: status["events"]["dropped"] > 0)["events"]
    assert events["sent"] == 0
    assert "refused" in events["last_error"]
    assert load.ended_well(), load.outcomes
    fallen = TriggerStore(world.querylog).state().domains["drift"]
    assert isinstance(fallen, Fallen)
    assert (fallen.fall.draft, fallen.fall.promised) == (hopeful, 3.9)


def test_f1_f19_a_replica_killed_without_a_registry_comes_back_with_its_draft(scene: Scene, world: World) -> None:
    last_good = world.versions[1]
    world.registry.promote("draft", last_good)
    world.wait_for_draft(last_good)
    with scene.registry.gone(), scene.load(num_clients=6) as load:
        status = world.wait_for("a look", lambda status: status["reconciler"].get("registry_unavailable", 0) > 0)
        assert (status["draft_version"], status["speculating"]) == (last_good, True)
        wait_until(lambda: load.outcomes["ok"] > 10, 60, None, "answers without the registry")
        assert load.ended_well(), load.outcomes

        num_engines, killed = len(scene.named("VLLM")), scene.replica()
        load.wait_for_stream()
        os.kill(killed, signal.SIGKILL)
        before, killed_s = load.outcomes["ok"], time.monotonic()
        back = world.wait_for("another", lambda told: told["uptime_s"] < time.monotonic() - killed_s, RECOVERY_S)
        assert (scene.replica() != killed, back["draft_version"]) == (True, last_good)
        world.wait_for("speculation", lambda status: status["speculating"] and status["proof"] is not None)
        wait_until(lambda: load.outcomes["ok"] > before + 10, 60, None, "answers from the next replica")
        assert len(scene.named("VLLM")) == num_engines
    assert load.ended_well("error frame", "429", "503"), load.outcomes
    assert load.outcomes["error frame"] > 0, load.outcomes


def test_f24_after_the_clock_jumped_drafts_are_followed_and_rows_keep_their_order(
    scene: Scene, world: World, clock: Clock
) -> None:
    first, second = world.versions
    log = QueryLog(world.querylog)
    seqs = [log.latest(1)[0].seq or 0]
    with scene.load() as load:
        for offset_s, version in ((DAY_S, second), (-DAY_S, first), (0, second)):
            clock.jump_to(offset_s)
            before = world.status()
            world.registry.promote("draft", version)
            world.wait_for_draft(version)
            world.wait_for("its proof", lambda status: bool(status["proof"]))
            wait_for_rows(world, before, num_rows=5)
            seqs.append(log.latest(1)[0].seq or 0)
        canaries = world.status()["reconciler"].get("canaries", 0)
        after = world.wait_for("a canary", lambda status: status["reconciler"].get("canaries", 0) > canaries)
    assert load.ended_well(), load.outcomes
    assert (after["fault"], after["postponed"]) == (None, {})
    jumps = [[row.time_ms for row in log.rows(low + 1, high)] for low, high in itertools.pairwise(seqs)]
    log.close()
    assert seqs == sorted(seqs)
    assert min(jumps[0][-1], jumps[2][-1]) > jumps[1][-1]  # by the clock the second part came two days before the first


def test_f23_a_draft_that_there_is_no_memory_for_is_loaded_once_there_is(scene: Scene, world: World) -> None:
    first, second = world.versions
    with scene.load(num_clients=2) as load:
        before = world.status()["swaps"]
        scene.memory.use(0.999)
        world.registry.promote("draft", second)
        status = world.wait_for("a wait", lambda status: status["postponed"] != {})
        [(name, told)] = status["postponed"].items()
        assert (name.startswith(f"{second}-"), "GiB of memory are free" in told) == (True, True)
        assert (status["draft_version"], status["speculating"], status["swaps"]) == (first, True, before)
        assert "quarantined" not in world.registry.get("draft", second).tags
        scene.memory.use(0.5)
        world.registry.promote("draft", first)  # it comes anew rather than after its wait
        world.wait_for("the end of the wait", lambda status: status["postponed"] == {})
        world.registry.promote("draft", second)
        world.wait_for_draft(second)
    assert load.ended_well(), load.outcomes


def test_f3_f14_streams_drain_before_the_end_and_with_another_target_no_old_draft_serves(scene: Scene) -> None:
    world = scene.world
    rolled = world.home / "rolled"
    shutil.copytree(world.target, rolled)
    [weights] = rolled.glob("*.safetensors")
    # Other bytes, the same answers.
    save_file(load_file(weights), weights, metadata={"format": "pt", "rolled": "again"})
    world.target = rolled
    with scene.load() as load:
        load.wait_for_stream()
        scene.restart()
        assert b"drained, 0 requests were cut off" in (world.home / "service.log").read_bytes()
        status = world.status()
        assert (status["draft_version"], status["speculating"], status["fallback"]) == (None, False, "no draft")
        before = load.outcomes["ok"]
        wait_until(lambda: load.outcomes["ok"] > before + 10, 60, None, "answers without speculation")
        world.registry.promote("draft", fitting := world.register(5, num_draft_tokens="2"))
        world.wait_for_draft(fitting, RECOVERY_S)
        status = world.wait_for("its proof", lambda status: status["speculating"] and status["proof"] is not None)
        # Head-only: look-up drafts up to 8 tokens, whatever K is.
        asked = world.operator | {"X-Redraft-Detail": "steps", "X-Redraft-Speculation": "head"}
        with world.client() as client:
            steps = stream_text(client, PROMPTS[0], extra_headers=asked)[2]
        # The replica of its own that it asked for booted with it, and with its K.
        assert (status["swaps"], max(steps["redraft"]["drafted_per_step"])) == (0, 2)
    # Serve kills its proxy at the end: a request that came in that moment gets no answer, but none that began breaks.
    assert load.ended_well("429", "503", "no connection", "no answer"), load.outcomes
    assert load.outcomes["no answer"] <= load.num_clients, load.outcomes


def test_a_service_that_lost_rays_node_ends_and_leaves_nothing(scene: Scene) -> None:
    programs = {Path(title.split()[0]).name: pid for pid, title in scene.processes() if title}
    require_end_without(programs["raylet"], scene.service)
