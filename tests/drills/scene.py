"""A running service over a registry that is a server, and what can be done to it from outside."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from infra.artifacts import staged
from infra.processes import Child, answers, free_port, hold_port, wait_until
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from models.core.drafting.draft_families import open_draft
from models.recipe import load_recipe
from tasks.measure_draft import measure_golden
from tests.drills.load import Client, Load, Wanted, quiet_answers
from tests.drills.machine import Clock, Memory, seen_with
from tests.drills.spoiled import Spoil
from tests.world import World

LOG_BYTES = 64 << 20


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
    """A running service over a registry that is a server; query log and cache lie on a small disk where one can be."""

    world: World
    registry: MlflowServer
    service: Child
    has_small_disk: bool
    wanted: dict[str, Wanted]
    clock: Clock
    memory: Memory
    runner: int = 0

    def __post_init__(self) -> None:
        self.runner = runner_of(self.service)

    def load(self, num_clients: int = 4) -> Load:
        return Load(self.world.url, self.wanted, [Client()] * num_clients)

    def replica(self) -> int:
        """Return the process id of the replica."""
        [pid] = self.named("ray::ServeReplica")
        return pid

    def named(self, title: str) -> list[int]:
        """Return the processes of the service in whose titles this is."""
        return [pid for pid, name in self.processes() if title in name]

    def processes(self) -> list[tuple[int, str]]:
        """Return id and title of what the service runs."""
        return processes_of(self.runner)

    def restart(self) -> None:
        """End the service as a person does and start it again with what the world's settings are now."""
        self.service.stop(grace_s=60)
        self.service = self.world.start()
        self.runner = runner_of(self.service)


def runner_of(service: Child) -> int:
    """Return the process in whose session all is that a service runs."""
    [main] = psutil.Process(service.pid).children()
    [runner] = main.children()
    return runner.pid


def processes_of(runner: int) -> list[tuple[int, str]]:
    """Return id and title of what runs in a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == runner and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, " ".join(process.cmdline())))
    return found


def require_end_without(killed: int, service: Child) -> None:
    """Kill what a service can't do without; it must end, and all that it ran."""
    runner = runner_of(service)
    assert any("VLLM" in title for _, title in processes_of(runner))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: service.poll() is not None, 60, None, "the end of the service")
    wait_until(lambda: processes_of(runner) == [], 60, None, "the end of all that it ran")


@contextmanager
def running(home: Path) -> Iterator[Scene]:
    """Run a service over the target in a home, with a registry server, a small disk, and a clock and memory to set."""
    registry = MlflowServer(home)
    registry.start()
    try:
        with (
            small_disk(home / "log") as has_small_disk,
            pytest.MonkeyPatch.context() as environment,
            hold_port("127.0.0.1", free_port()) as unheard,
        ):
            world = World(
                home,
                home / "target",
                registry.url,
                orchestrator=f"http://127.0.0.1:{unheard.getsockname()[1]}/api",  # where nobody listens, or will
                cache=home / "log" / "cache",
                serve={
                    "drift_detector": {"period_s": 0.3, "min_requests": 4, "between_alarms": 2},
                    "canary": {"period_s": 3.0},
                },
            )
            (machine := home / "machine").mkdir()
            clock, memory = Clock(machine / "offset"), Memory(machine / "meminfo")
            for name, value in seen_with(machine, clock, memory).items():
                environment.setenv(name, value)
            scene = Scene(world, registry, world.start(), has_small_disk, {}, clock, memory)
            try:
                scene.wanted = quiet_answers(world)
                yield scene
            finally:
                scene.service.stop(grace_s=60)
    finally:
        registry.kill()


@contextmanager
def small_disk(folder: Path, num_bytes: int = LOG_BYTES) -> Iterator[bool]:
    """Mount a small disk on a new folder; say whether it may be done here, else it is a plain folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    has_small_disk = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield has_small_disk
    finally:
        if has_small_disk:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path, but_bytes: int = 0) -> Iterator[None]:
    """Leave nothing free on the disk of a folder, or so little."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - but_bytes)
        yield
    finally:
        filler.unlink()


def register_changed(home: Path, change: Spoil, golden_tau: float | None = None) -> int:
    """Register the first draft of a tiny build with a change, and an honest promise unless another is given."""
    registry, made = open_registry(Settings(home=home)), home / "made" / f"{time.monotonic_ns()}"
    first, target = registry.get("draft", 1), registry.champion("target")
    assert target is not None
    draft_dir, target_dir = (registry.download(one, home / "made-of") for one in (first, target))
    with staged(made) as directory:
        shutil.copytree(draft_dir, directory, dirs_exist_ok=True)
        (directory / "manifest.json").unlink()
        change(directory)
    if golden_tau is None:
        k = load_recipe("tiny").num_draft_tokens
        golden_tau = measure_golden(open_draft(made, target_dir), target_dir, k, home / "made" / "golden")
    tags = first.lineage.model_copy(update={"parent": 1, "gate": "passed", "golden_tau": golden_tau}).to_tags()
    return registry.register("draft", made, tags).number
