"""Long-running programs kept alive by one process, which leaves its state in a file that other processes read.

Each program starts as soon as those answer that it comes after; they end in reverse order. One that ends by itself is
started again once its port is free, after a pause that doubles while it keeps failing. All of them die with the
supervisor, however it ends (infra/processes.py).
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from infra.files import write_atomic
from infra.machine import process_identity
from infra.processes import Child, answers, port_is_free
from models.types import Frozen

STATE = "up.json"
POLL_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0  # a program that ran this long did not fail at its start
HELD_S = 60.0  # how long what is left of a killed program may hold its port before the next one is to fail on it

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """What is to run.

    Attributes:
        url: where it is found, "" if nowhere.
        health: address that is answered with 2xx once it is ready, "" if it needs no waiting for.
        after: names of those before it that must answer when it first starts.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    health: str = ""
    start_timeout_s: float = 120.0
    grace_s: float = 20.0
    first_pause_s: float = 1.0
    after: tuple[str, ...] = ()


class ProcessRecord(Frozen):
    """One program as the state file tells it; `pid` is None while it is down."""

    name: str
    url: str
    pid: int | None
    restarts: int
    ready: bool
    log: str

    @property
    def state(self) -> str:
        return "running" if self.ready else "starting" if self.pid else "down"


class UpState(Frozen):
    """The state file's content; `identity` tells the supervisor from a later process of the same number."""

    pid: int
    identity: str
    recipe: str
    programs: tuple[ProcessRecord, ...]
    failure: str = ""

    @property
    def ready(self) -> bool:
        return all(program.ready for program in self.programs)

    def url(self, name: str) -> str:
        return next((program.url for program in self.programs if program.name == name), "")


def read_state(home: Path) -> UpState | None:
    """Return what the supervisor of a home says; None without one that runs."""
    try:
        state = UpState.model_validate_json((home / STATE).read_bytes())
    except FileNotFoundError:
        return None
    return state if process_identity(state.pid) == state.identity else None


class Supervisor:
    def __init__(self, programs: Sequence[Program], home: Path, recipe: str) -> None:
        self._programs, self._home, self._recipe = programs, home, recipe
        self._children: dict[str, Child] = {}
        self._restarts = dict.fromkeys((program.name for program in programs), 0)
        self._ready: set[str] = set()
        self._started_s: dict[str, float] = {}
        self._pause_s = {program.name: program.first_pause_s for program in programs}
        self._due_s: dict[str, float] = {}
        self._ended = threading.Event()
        self._failure = ""
        self._untold = False  # the state file is behind

    def run(self) -> int:
        """Keep the programs running until SIGTERM or SIGINT; return 1 if one could not be started at first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        self._write()
        try:
            if not self._come_up():
                return 0 if self._ended.is_set() else 1
            while not self._ended.wait(POLL_S):
                for program in self._programs:
                    self._keep(program)
                if self._untold:
                    self._tell()
            return 0
        finally:
            for program in reversed(self._programs):
                if program.name in self._children:
                    self._children[program.name].stop(program.grace_s)
            if not self._failure:
                (self._home / STATE).unlink(missing_ok=True)

    def _come_up(self) -> bool:
        """Start all, and wait until they answer; return whether they do."""
        while True:
            before = len(self._children), len(self._ready)
            for program in self._programs:
                if program.name not in self._children:
                    if self._ready.issuperset(program.after):
                        self._start(program)
                elif program.name not in self._ready and not self._answers_yet(program):
                    return False
            if (len(self._children), len(self._ready)) != before:
                self._write()
            if len(self._ready) == len(self._programs):
                return True
            if self._ended.wait(POLL_S):
                return False

    def _answers_yet(self, program: Program) -> bool:
        """Look whether a program answers that was started; return False if it never will."""
        child = self._children[program.name]
        late, code = time.monotonic() > self._started_s[program.name] + program.start_timeout_s, child.poll()
        if answers(program.health):
            self._ready.add(program.name)
        elif late or code is not None:
            self._failure = f"{program.name} {'did not answer' if late else f'ended with {code}'}\n{child.tail()}"
            log.error("%s", self._failure)
            self._write()
            return False
        return True

    def _keep(self, program: Program) -> None:
        now_s, name = time.monotonic(), program.name
        if (code := self._children[name].poll()) is None:
            if name not in self._ready and answers(program.health):
                self._ready.add(name)
                self._tell()
        elif name not in self._due_s:
            steady = now_s - self._started_s[name] > STEADY_S
            self._pause_s[name] = program.first_pause_s if steady else min(2 * self._pause_s[name], LONGEST_PAUSE_S)
            self._due_s[name] = now_s + self._pause_s[name]
            self._ready.discard(name)
            said = ""
            with suppress(OSError):  # its log may have been taken away
                said = self._children[name].tail(1)
            log.warning("%s ended with %s (%s); restarting in %g s", name, code, said, self._pause_s[name])
            self._tell()
        elif now_s >= self._due_s[name] and (now_s >= self._due_s[name] + HELD_S or not _port_held(program)):
            del self._due_s[name]
            self._restarts[name] += 1
            try:
                self._start(program)
            except OSError as error:  # of memory, processes or disk; the program that ended stands for it
                log.warning("%s could not be started: %s", name, error)
            self._tell()

    def _start(self, program: Program) -> None:
        self._started_s[program.name] = time.monotonic()
        self._children[program.name] = Child.start(program.argv, program.env, self._log(program), program.name)
        if not program.health:
            self._ready.add(program.name)

    def _tell(self) -> None:
        """Write the state, or say once that it can't be written: what runs must not end for it."""
        try:
            self._write()
        except OSError as error:
            if not self._untold:
                log.warning("%s can't be written and is behind: %s", self._home / STATE, error)
            self._untold = True
        else:
            self._untold = False

    def _write(self) -> None:
        alive = {name: child.pid for name, child in self._children.items() if child.poll() is None}
        running = tuple(
            ProcessRecord(
                name=program.name,
                url=program.url,
                pid=alive.get(program.name),
                restarts=self._restarts[program.name],
                ready=program.name in self._ready,
                log=str(self._log(program)),
            )
            for program in self._programs
        )
        pid = os.getpid()
        identity = process_identity(pid)
        assert identity is not None
        state = UpState(pid=pid, identity=identity, recipe=self._recipe, programs=running, failure=self._failure)
        write_atomic(self._home / STATE, json.dumps(state.model_dump(), indent=1) + "\n")

    def _log(self, program: Program) -> Path:
        return self._home / "logs" / f"{program.name}.log"


def _port_held(program: Program) -> bool:
    """Return whether something still listens where the program is to be found: it would also answer for it."""
    if not program.url:
        return False
    address = urlsplit(program.url)
    assert address.hostname is not None and address.port is not None
    return not port_is_free(address.hostname, address.port)
