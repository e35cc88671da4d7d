"""The trigger's states in a small SQLite file beside the query log: who reads the log reads them.

A run holds a lock on a second file for as long as it lives, so that one which was killed is seen at once, by any
process of the machine and without a clock. Nothing of a request's text is kept here.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from infra.files import lock_file
from infra.logfile import BUSY_TIMEOUT_S, TORN, writing
from infra.triggers import STATE, Ended, Event, Lost, Ok, Result, Retry, Running, Started, State, step
from models.types import Frozen

LOOK_S, NOTE_S = 2.0, 15.0  # whoever looks holds the lock for milliseconds
# Outcome of a run that did not start, or was ended, because memory ran short: it is asked for again when there is room.
WAITS_FOR_MEMORY: Literal["waits for memory"] = "waits for memory"
SCHEMA_VERSION = 2
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS domains (domain TEXT PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, body TEXT NOT NULL);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
Fact = TypeVar("Fact", bound=Frozen)


class LastRun(Frozen):
    """The newest refresh; `retry` has the waits that its recipe wants if it dies, `outcome` is "" while it runs."""

    started_ms: int
    ended_ms: int | None = None
    outcome: str = ""
    retry: Retry


class Need(Frozen):
    """The memory that the last refresh took which learned something, at its peak."""

    gib: float


class LastLook(Frozen):
    """What the process that asks for refreshes saw when it looked last.

    Attributes:
        min_rows: rows of all domains that a refresh wants.
        wanted: fallen or low domain to the rows of its own that a refresh wants.
        interval_s: seconds between scheduled refreshes; None if there are none.
        interval_from_ms: since when these are counted, if no run was seen.
        short_of_memory: why no refresh is asked for that is wanted; "" if there is room.
        error: why the orchestrator took no wish; "" if it did, or none was due.
        within_share: rows within each key's share, where a refresh waits for more of other keys until `share_until_ms`.
    """

    at_ms: int
    min_rows: int
    wanted: dict[str, int]
    interval_s: float | None
    interval_from_ms: int
    short_of_memory: str = ""
    error: str = ""
    error_since_ms: int | None = None
    within_share: int | None = None
    share_until_ms: int = 0

    def covers(self, later: "LastLook") -> bool:
        """Whether a look soon afterwards saw the same, so that it needs no writing."""
        same = later.model_copy(update={"at_ms": self.at_ms}) == self
        return same and 0 <= later.at_ms - self.at_ms < NOTE_S * 1000


class RunRequest(Frozen):
    """The wish that the orchestrator is asked with; it makes one run of each.

    `log` tells this log from others that share an orchestrator; `number` grows when a run acknowledged the wish, or
    ended without doing so.
    """

    log: str
    number: int = 0

    @property
    def key(self) -> str:
        return f"redraft-{self.log}-{self.number}"


class TriggerState(Frozen):
    """All that the file says; domains that are ok are left out."""

    domains: dict[str, State]
    running: bool
    last_run: LastRun | None
    last_look: LastLook | None
    need: Need | None = None

    @property
    def waits_for_memory(self) -> bool:
        return not self.running and self.last_run is not None and self.last_run.outcome == WAITS_FOR_MEMORY


def trigger_path(querylog: Path) -> Path:
    return querylog.with_name(f"{querylog.stem}-trigger.db")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def since(from_ms: int, at_ms: int) -> str:
    """Return the time span between two moments, none where the clock was put back."""
    return duration(max(0, at_ms - from_ms) / 1000)


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class TriggerFile:
    """The states in one SQLite file, made at first use. Safe to use from several threads and processes."""

    def __init__(self, querylog: Path, clock: Callable[[], int] = now_ms) -> None:
        self.path, self.clock = trigger_path(querylog), clock

    def state(self) -> TriggerState:
        with self._open() as db:
            domains, last_run, look, need = _domains(db), _fact(db, LastRun), _fact(db, LastLook), _fact(db, Need)
        return TriggerState(domains=domains, running=self._is_held(), last_run=last_run, last_look=look, need=need)

    def tell(self, events: Mapping[str, Event]) -> dict[str, State]:
        """Let something happen to domains; returns those whose state changed.

        sqlite3.Error if the file is locked, full or broken; then nothing has changed.
        """
        with self._open() as db:
            if not _changed(db, events):
                return {}  # the common case, which takes no lock
            with writing(db):
                return _apply(db, events)

    def find_lost(self) -> None:
        """Let domains whose refresh is gone wait for the next one."""
        with self._lock(shared=True) as held:
            if held:
                with self._open() as db:
                    last = _fact(db, LastRun)
                    if last is not None and last.ended_ms is None:
                        with writing(db):
                            _end_lost(db, last, self.clock())

    @contextmanager
    def run(self, retry: Retry) -> Iterator[Callable[[Result, str], None]]:
        """Acknowledge what is wanted, and hold it for as long as the context lasts.

        The context gets what it calls with the result, and the outcome in the flow's words; without a call the run
        counts as lost. A second run at the same time acknowledges nothing, and its call does nothing.
        """
        with self._lock() as held:
            if not held:
                yield lambda result, outcome: None
                return
            with self._open() as db, writing(db):
                last = _fact(db, LastRun)
                if last is not None and last.ended_ms is None:
                    _end_lost(db, last, self.clock())
                _apply(db, dict.fromkeys(_domains(db), Started()))
                _keep(db, LastRun(started_ms=self.clock(), retry=retry))
                _keep(db, _next(_wish(db)))

            def end(result: Result, outcome: str) -> None:
                with self._open() as db, writing(db):
                    last, at_ms = _fact(db, LastRun), self.clock()
                    _apply(db, dict.fromkeys(_domains(db), Ended(result=result, now_ms=at_ms, retry=retry)))
                    if last is not None:
                        _keep(db, last.model_copy(update={"ended_ms": at_ms, "outcome": outcome}))

            yield end

    def wish(self) -> RunRequest:
        with self._open() as db, writing(db):
            return _wish(db)

    def ask_anew(self, wish: RunRequest) -> None:
        """Ask with another wish from now on: this one's run ended without acknowledging it."""
        with self._open() as db, writing(db):
            if _wish(db) == wish:
                _keep(db, _next(wish))

    def note(self, fact: LastLook | Need) -> None:
        with self._open() as db, writing(db):
            _keep(db, fact)

    def _is_held(self) -> bool:
        with self._lock(shared=True) as held:
            return not held

    def _lock(self, shared: bool = False) -> AbstractContextManager[bool]:
        """Hold the lock of runs if nobody else does; whoever only looks shares it with others who look."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return lock_file(self.path.with_suffix(".lock"), shared, wait_s=0 if shared else LOOK_S)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same rights
        with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
            try:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise ValueError(f"{self.path} has schema version {version}, wanted at most {SCHEMA_VERSION}")
                if version < SCHEMA_VERSION:
                    db.execute("PRAGMA journal_mode = WAL")
                    db.executescript(SCHEMA)
                yield db
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode in TORN:
                    self._set_aside()
                raise

    def _set_aside(self) -> None:
        """Make room for a new file: the service tells again what has fallen, so a torn one stops no later refresh."""
        self.path.replace(self.path.with_suffix(".torn"))
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


def _domains(db: sqlite3.Connection) -> dict[str, State]:
    found = db.execute("SELECT domain, state FROM domains ORDER BY domain")
    return {domain: STATE.validate_json(state) for domain, state in found}


def _changed(db: sqlite3.Connection, events: Mapping[str, Event]) -> dict[str, State]:
    before = _domains(db)
    after = {domain: step(before.get(domain, Ok()), event) for domain, event in events.items()}
    return {domain: state for domain, state in after.items() if state != before.get(domain, Ok())}


def _apply(db: sqlite3.Connection, events: Mapping[str, Event]) -> dict[str, State]:
    changed = _changed(db, events)
    for domain, state in changed.items():
        if isinstance(state, Ok):
            db.execute("DELETE FROM domains WHERE domain = ?", (domain,))
        else:
            db.execute("INSERT OR REPLACE INTO domains VALUES (?, ?)", (domain, state.model_dump_json()))
    return changed


def _end_lost(db: sqlite3.Connection, last: LastRun, at_ms: int) -> None:
    running = [domain for domain, state in _domains(db).items() if isinstance(state, Running)]
    _apply(db, dict.fromkeys(running, Lost(now_ms=at_ms, retry=last.retry)))
    _keep(db, last.model_copy(update={"ended_ms": at_ms, "outcome": "lost"}))


def _fact(db: sqlite3.Connection, kind: type[Fact]) -> Fact | None:
    found = db.execute("SELECT body FROM facts WHERE name = ?", (kind.__name__,)).fetchone()
    return None if found is None else kind.model_validate_json(found[0])


def _keep(db: sqlite3.Connection, fact: Frozen) -> None:
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (type(fact).__name__, fact.model_dump_json()))


def _wish(db: sqlite3.Connection) -> RunRequest:
    wish = _fact(db, RunRequest)
    if wish is None:
        wish = RunRequest(log=uuid.uuid4().hex[:12])
        _keep(db, wish)
    return wish


def _next(wish: RunRequest) -> RunRequest:
    return wish.model_copy(update={"number": wish.number + 1})
