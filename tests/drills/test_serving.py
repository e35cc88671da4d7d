"""Faults of a running service under load: bad drafts, a full disk, a registry, orchestrator or replica that is gone."""

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infra.manifest import write_manifest
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.registry import CHAMPION
from infra.settings import load_settings
from infra.triggerfile import TriggerFile
from infra.triggers import Fallen
from models.drafts.eagle3 import WEIGHTS
from tests.drills.load import Load, Wanted, quiet_answers
from tests.world import World, ask, make_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LOG_BYTES = 64 << 20
# The engine's own start takes most of it.
RECOVERY_S = 150.0
DAY_S = 86_400
# Python runs a module of this name in every process that finds it: their wall clock is then off by what a file says.
CLOCK = """
import mmap, struct, time
with open({file!r}, "r+b") as _file:
    _page = mmap.mmap(_file.fileno(), 8)
_time, _time_ns = time.time, time.time_ns
_offset_s = lambda: struct.unpack("<q", _page[:8])[0]
time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
"""


class Clock:
    """The wall clock of the processes that are started while `path` is in their PYTHONPATH."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._file = path / "offset"
        self.jump_to(0)
        (path / "sitecustomize.py").write_text(CLOCK.format(file=str(self._file)))
        self.variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))}

    def jump_to(self, offset_s: int) -> None:
        """Let it be off by so many seconds."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("<q", offset_s))


class MlflowServer:
    """The registry as a server that can be killed and started again in the same place."""

    def __init__(self, home: Path) -> None:
        self._home, self._port = home, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._child: Child | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self._home}/mlflow.db"]
        argv += ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        variables = load_settings({"REDRAFT_HOME": str(self._home)}).process_variables()
        self._child = Child.start(argv, variables, self._home / "mlflow.log", "mlflow")
        wait_until(lambda: answers(f"{self.url}/health"), 120, self._child, "mlflow")

    def kill(self) -> None:
        if self._child is not None:
            self._child.stop(grace_s=0)
            self._child = None

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Kill it, and start it again at the end."""
        self.kill()
        try:
            yield
        finally:
            self.start()


@dataclass
class Scene:
    """A running service over a registry that is a server, its query log on a small disk where one can be mounted."""

    world: World
    registry: MlflowServer
    service: Child
    has_small_disk: bool
    wanted: dict[str, Wanted]
    clock: Clock
    runner: int = 0

    def __post_init__(self) -> None:
        self.runner = self._runner()

    def load(self, num_clients: int = 4) -> Load:
        return Load(self.world.url, self.wanted, num_clients)

    def replica(self) -> int:
        """Return the process id of the replica."""
        [pid] = [pid for pid, name in self.processes() if name.startswith("ray::ServeReplica")]
        return pid

    def processes(self) -> list[tuple[int, str]]:
        """Return id and name of what the service runs; all of it is in the session of its runner."""
        found = [process for process in psutil.process_iter(["name", "status"]) if _session(process.pid) == self.runner]
        return [(one.pid, _title(one)) for one in found if one.info["status"] != psutil.STATUS_ZOMBIE]

    def restart(self) -> None:
        """Start the service again with what the world's settings are now."""
        self.service.stop(grace_s=60)
        self.service = self.world.start()
        self.runner = self._runner()

    def _runner(self) -> int:
        [main] = psutil.Process(self.service.pid).children()
        [runner] = main.children()
        return runner.pid


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="module")
def scene(tiny_target: Path, engine: Any, loop: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("scene")
    make_target(tiny_target, home / "target", engine, loop)
    registry = MlflowServer(home)
    registry.start()
    small = home / "log"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={LOG_BYTES}", "tmpfs", str(small)]
    has_small_disk = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        world = World(
            home,
            home / "target",
            registry.url,
            orchestrator=f"http://127.0.0.1:{free_port()}/api",  # where nobody listens
            serve={"watch": {"period_s": 0.3, "min_requests": 4}, "canary": {"period_s": 3.0}},
        )
        clock = Clock(home / "clock")
        with pytest.MonkeyPatch.context() as environment:
            for name, value in clock.variables.items():
                environment.setenv(name, value)
            scene = Scene(world, registry, world.start(), has_small_disk, {}, clock)
            try:
                scene.wanted = quiet_answers(world)
                yield scene
            finally:
                scene.service.stop(grace_s=60)
    finally:
        registry.kill()
        if has_small_disk:
            subprocess.run(["umount", "--lazy", str(small)], check=True)


@pytest.fixture
def world(scene: Scene) -> Iterator[World]:
    """The world, which a test leaves with its first draft served and logging."""
    yield scene.world
    scene.world.registry.promote("draft", scene.world.versions[0])
    scene.world.wait_for_draft(scene.world.versions[0])


@pytest.fixture
def clock(scene: Scene) -> Iterator[Clock]:
    """The service's clock. Ray Serve asks no replica for its health until a clock that was set back has caught up."""
    yield scene.clock
    scene.clock.jump_to(0)
    scene.restart()


def test_f16_with_a_full_disk_under_the_query_log_serving_goes_on_and_lost_rows_are_counted(
    scene: Scene, world: World
) -> None:
    if not scene.has_small_disk:
        pytest.skip("mounting a small disk is not allowed here")
    assert world.status()["log"]["dropped"] == 0
    filler = world.querylog.with_name("filler")
    with scene.load() as load:
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        lost = world.wait_for("lost rows", lambda status: status["log"]["dropped"] > 0)["log"]
        assert "full" in lost["last_error"]
        filler.unlink()
        world.wait_for("rows again", lambda status: status["log"]["written"] > lost["written"])
    assert load.ended_well(), load.outcomes
    told = b"the query log takes no rows"
    wait_until(lambda: told in (world.home / "service.log").read_bytes(), 20, None, "a warning in the log")

    def every_loss_is_in_the_log() -> bool:
        log = QueryLog(world.querylog)
        dropped = log.stats().dropped
        log.close()
        return dropped == world.status()["log"]["dropped"]

    wait_until(every_loss_is_in_the_log, 20, None, "the count of lost rows in the log")


Spoil = Callable[[Path], None]


def tensors_changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Spoil:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return spoil


def bytes_changed(change: Callable[[bytearray], bytes | bytearray]) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / WEIGHTS
        file.write_bytes(change(bytearray(file.read_bytes())))

    return spoil


def config_changed(**values: object) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def with_flipped_bit(content: bytearray) -> bytearray:
    content[-1] ^= 1
    return content


def with_header(content: bytearray) -> bytearray:
    content[:8] = b"\xff" * 8
    return content


def set_value(value: float) -> Spoil:
    return tensors_changed(lambda tensors: tensors["fc.weight"].view(-1)[:1].fill_(value))


NAN, INFINITE = set_value(float("nan")), set_value(float("inf"))
MISSING = tensors_changed(lambda tensors: tensors.__delitem__("fc.weight"))
EXTRA = tensors_changed(lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}))
DTYPE = tensors_changed(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].double()}))
SHAPE = tensors_changed(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, 1:].contiguous()}))
BEYOND = tensors_changed(lambda tensors: tensors["d2t"].add_(10**6))


@pytest.mark.parametrize(
    ("spoil", "before_it_is_registered", "tags", "reason"),
    [
        (bytes_changed(lambda content: content[: len(content) // 2]), True, {}, "not a safetensors file"),
        (bytes_changed(lambda content: content[: len(content) // 2]), False, {}, "the manifest says"),
        (bytes_changed(lambda content: b""), True, {}, "not a safetensors file"),
        (bytes_changed(lambda content: b""), False, {}, "has 0 bytes"),
        (bytes_changed(with_header), True, {}, "not a safetensors file"),
        (bytes_changed(with_flipped_bit), False, {}, "has sha256"),
        (MISSING, True, {}, "fc.weight is missing"),
        (EXTRA, True, {}, "extra.weight is not one"),
        (DTYPE, True, {}, "fc.weight is torch.float64"),
        (SHAPE, True, {}, "fc.weight is torch.bfloat16"),
        (NAN, True, {}, "fc.weight holds NaN"),
        (INFINITE, True, {}, "fc.weight holds NaN or infinite"),
        (config_changed(architectures=["Other"]), True, {}, "architecture"),
        (config_changed(vocab_size=32_000), True, {}, "vocab_size 32000"),
        (BEYOND, True, {}, "d2t must name ascending tokens"),
        (None, True, {"vocab_size": "32000"}, "tag vocab_size"),
        (None, True, {"tokenizer_sha256": "0" * 64}, "tag tokenizer_sha256"),
        (config_changed(redraft={"tokenizer_sha256": "0" * 64}), True, {}, "was made for tokenizer_sha256"),
    ],
    ids=[
        "F7 truncated", "F7 truncated later", "F7 empty", "F7 emptied later", "F7 header", "F8 bit",
        "F9 missing", "F9 extra", "F9 dtype", "F9 shape", "F10 NaN", "F10 infinite", "architecture",
        "F12 vocabulary", "F12 map", "F12 tag", "F13 tag", "F13 config",
    ],
)  # fmt: skip
def test_a_bad_draft_is_refused_by_name_and_the_last_good_one_serves_on(
    scene: Scene,
    world: World,
    spoil: Spoil | None,
    before_it_is_registered: bool,
    tags: dict[str, str],
    reason: str,
) -> None:
    directory = world.home / "made" / f"bad-{time.monotonic_ns()}"
    shutil.copytree(world.make(1), directory)
    if spoil is not None and before_it_is_registered:
        spoil(directory)
        write_manifest(directory)
    with scene.load(num_clients=2) as load:
        bad = world.register_files(directory, **tags)
        if spoil is not None and not before_it_is_registered:
            spoil(max(world.home.glob(f"artifacts/**/{WEIGHTS}"), key=lambda file: file.stat().st_mtime_ns).parent)
        world.registry.promote("draft", bad)
        status = world.wait_for("refusal", lambda status: any(name.startswith(f"{bad}-") for name in status["refused"]))
        [told] = [told for name, told in status["refused"].items() if name.startswith(f"{bad}-")]
        assert reason in told
        assert (status["draft_version"], status["speculating"]) == (world.versions[0], True)
        if tags:  # it may suit another service
            assert "quarantined" not in world.registry.get("draft", bad).tags
        else:
            tag = "quarantined"
            wait_until(lambda: reason in world.registry.get("draft", bad).tags.get(tag, ""), 20, None, tag)
    assert load.ended_well(), load.outcomes


def test_f24_after_the_clock_jumped_drafts_are_followed_as_before_and_rows_keep_their_order(
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
            world.wait_for(
                "the swap and its proof", lambda status, v=version: status["draft_version"] == v and status["proof"], 30
            )
            written = before["log"]["written"]
            world.wait_for("more rows", lambda status, w=written: status["log"]["written"] > w + 4, 30)
            seqs.append(log.latest(1)[0].seq or 0)
        canaries = world.status()["reconciler"].get("canaries", 0)
        after = world.wait_for("a canary", lambda status: status["reconciler"].get("canaries", 0) > canaries, 30)
    assert load.ended_well(), load.outcomes
    assert (after["fault"], after["postponed"]) == (None, {})
    jumps = [[row.time_ms for row in log.rows(low + 1, high)] for low, high in itertools.pairwise(seqs)]
    log.close()
    assert seqs == sorted(seqs)
    assert min(jumps[0][-1], jumps[2][-1]) > jumps[1][-1]  # by the clock the second part came two days before the first


def test_f21_what_somebody_set_by_hand_in_the_registry_is_ignored_and_counted(scene: Scene, world: World) -> None:
    from mlflow import MlflowClient

    by_hand = MlflowClient(world.registry.store.uri, world.registry.store.uri)
    ours = by_hand.get_model_version("draft", "1")
    number = by_hand.create_model_version("draft", source=ours.source, model_id=ours.tags["model_id"]).version
    before = world.status()["reconciler"].get("errors", 0)
    with scene.load(num_clients=2) as load:
        by_hand.set_registered_model_alias("draft", CHAMPION, number)
        status = world.wait_for("a count", lambda status: status["reconciler"].get("errors", 0) > before)
        assert (status["draft_version"], status["speculating"]) == (world.versions[0], True)
    assert load.ended_well(), load.outcomes


def test_f20_without_the_orchestrator_serving_goes_on_and_what_asks_for_a_refresh_stays(
    scene: Scene, world: World
) -> None:
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
    fallen = TriggerFile(world.querylog).snapshot().domains["drift"]
    assert isinstance(fallen, Fallen)
    assert (fallen.fall.draft, fallen.fall.promised) == (hopeful, 3.9)


def test_f1_f19_a_replica_killed_while_the_registry_is_down_comes_back_with_the_last_good_draft(
    scene: Scene, world: World
) -> None:
    last_good = world.versions[1]
    world.registry.promote("draft", last_good)
    world.wait_for_draft(last_good)
    with scene.registry.gone(), scene.load(num_clients=6) as load:
        world.wait_for("a look in vain", lambda status: status["reconciler"].get("registry_unavailable", 0) > 0)
        status = world.status()
        assert (status["draft_version"], status["speculating"]) == (last_good, True)
        wait_until(lambda: load.outcomes["ok"] > 10, 60, None, "answers without the registry")
        assert load.ended_well(), load.outcomes

        num_engines = sum("VLLM" in name for _, name in scene.processes())
        killed = scene.replica()
        wait_until(lambda: bool(load.streaming), 60, None, "a stream that has begun")
        os.kill(killed, signal.SIGKILL)
        before, killed_s = load.outcomes["ok"], time.monotonic()
        back = world.wait_for(
            "the next replica", lambda status: status["uptime_s"] < time.monotonic() - killed_s, RECOVERY_S
        )
        assert scene.replica() != killed
        assert back["draft_version"] == last_good
        world.wait_for("speculation", lambda status: status["speculating"] and status["proof"] is not None)
        wait_until(lambda: load.outcomes["ok"] > before + 10, 60, None, "answers from the next replica")
        assert sum("VLLM" in name for _, name in scene.processes()) == num_engines
    assert load.ended_well("error frame", "429", "503"), load.outcomes
    assert load.outcomes["error frame"] > 0, load.outcomes


def test_f14_after_the_target_was_rolled_speculation_is_off_until_a_draft_for_it_comes(scene: Scene) -> None:
    world = scene.world
    rolled = world.home / "rolled"
    shutil.copytree(world.target, rolled)
    [weights] = rolled.glob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, weights, metadata={"format": "pt", "rolled": "again"})  # other bytes, the same answers
    world.target = rolled
    scene.restart()
    status = world.status()
    assert (status["draft_version"], status["speculating"], status["fallback"]) == (None, False, "no draft")
    with scene.load() as load:
        wait_until(lambda: load.outcomes["ok"] > 10, 60, None, "answers without speculation")
        fitting = world.register(4)
        world.registry.promote("draft", fitting)
        status = world.wait_for(
            "the replica with the draft", lambda status: status["draft_version"] == fitting, RECOVERY_S
        )
        world.wait_for("its proof", lambda status: status["speculating"] and status["proof"] is not None)
    assert load.ended_well("429", "503"), load.outcomes


def test_nothing_outlives_a_runner_that_was_killed(scene: Scene) -> None:
    assert any("VLLM" in name for _, name in scene.processes())
    os.kill(scene.runner, signal.SIGKILL)
    wait_until(lambda: scene.service.poll() is not None, 60, None, "the end of the service")
    wait_until(lambda: scene.processes() == [], 30, None, "the end of all that it ran")
