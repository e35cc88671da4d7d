"""The trigger's states, in the query log's database: who reads the log reads them.

A run holds a lease for as long as it lives (infra/database.py), so that one which was killed is seen. Nothing of a
request's text is kept here.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from sqlalchemy import Connection, delete, insert, select, update

from infra.database import LEASE_S, Database, DatabaseUnavailable, is_held, lease, renewing
from infra.tables import trigger_domains, trigger_facts, trigger_run
from infra.triggers import STATE, Ended, Event, Lost, Ok, Result, Retry, Running, Started, State, step
from models.types import Frozen

NOTE_S = 15.0
# Outcome of a run that did not start, or was ended, because memory ran short: it is asked for again when there is room.
WAITS_FOR_MEMORY: Literal["waits for memory"] = "waits for memory"
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
    """All that is known; domains that are ok are left out."""

    domains: dict[str, State]
    running: bool
    last_run: LastRun | None
    last_look: LastLook | None
    need: Need | None = None

    @property
    def waits_for_memory(self) -> bool:
        return not self.running and self.last_run is not None and self.last_run.outcome == WAITS_FOR_MEMORY


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


class TriggerStore:
    """The states at a query log's address. Safe to use from several threads and processes."""

    def __init__(self, address: Path | str, clock: Callable[[], int] = now_ms) -> None:
        self._database, self.clock = Database(address), clock

    def state(self) -> TriggerState:
        with self._database.reading() as db:
            return TriggerState(
                domains=_domains(db),
                running=self._is_held(db),
                last_run=_fact(db, LastRun),
                last_look=_fact(db, LastLook),
                need=_fact(db, Need),
            )

    def tell(self, events: Mapping[str, Event]) -> dict[str, State]:
        """Let something happen to domains; returns those whose state changed.

        DatabaseUnavailable if it can't be kept; then nothing has changed.
        """
        with self._database.reading() as db:
            if not _changed(db, events):
                return {}  # the common case, which waits for nobody
        with self._database.writing() as db:
            return _apply(db, events)

    def find_lost(self) -> None:
        """Let domains whose refresh is gone wait for the next one."""
        with self._database.reading() as db:
            if not self._is_lost(db):
                return
        with self._database.writing() as db:
            if self._is_lost(db):
                _end_lost(db, self.clock())

    @contextmanager
    def run(self, retry: Retry, lease_s: float = LEASE_S) -> Iterator[Callable[[Result, str], None]]:
        """Acknowledge what is wanted, and hold it for as long as the context lasts.

        The context gets what it calls with the result, and the outcome in the flow's words; without a call the run
        counts as lost. A second run at the same time acknowledges nothing, and its call does nothing; so it is with one
        that stood still for longer than its lease, and was taken for lost.
        """
        with self._database.writing() as db:
            begun = not self._is_held(db)
            if begun:
                _end_lost(db, self.clock())
                _apply(db, dict.fromkeys(_domains(db), Started()))
                _keep(db, LastRun(started_ms=self.clock(), retry=retry))
                _keep(db, _next(_wish(db)))
                mine = lease(self._database, db, lease_s)
                db.execute(delete(trigger_run))
                db.execute(insert(trigger_run).values(mine))
        if not begun:
            yield lambda result, outcome: None
            return
        of_mine = trigger_run.c.process == mine["process"]

        def renew() -> bool:
            with self._database.writing() as db:
                until_ms = lease(self._database, db, lease_s)["lease_until_ms"]
                renewed = update(trigger_run).where(of_mine).values(lease_until_ms=until_ms)
                return bool(db.execute(renewed).rowcount)

        def end(result: Result, outcome: str) -> None:
            with self._database.writing() as db:
                if db.execute(select(trigger_run).where(of_mine)).one_or_none() is None:
                    return
                last, at_ms = _fact(db, LastRun), self.clock()
                _apply(db, dict.fromkeys(_domains(db), Ended(result=result, now_ms=at_ms, retry=retry)))
                if last is not None:
                    _keep(db, last.model_copy(update={"ended_ms": at_ms, "outcome": outcome}))

        try:
            with renewing(renew, lease_s):
                yield end
        finally:
            # Where it can't be released now, it is not renewed any more.
            with suppress(DatabaseUnavailable), self._database.writing() as db:
                db.execute(delete(trigger_run).where(of_mine))

    def wish(self) -> RunRequest:
        with self._database.writing() as db:
            return _wish(db)

    def ask_anew(self, wish: RunRequest) -> None:
        """Ask with another wish from now on: this one's run ended without acknowledging it."""
        with self._database.writing() as db:
            if _wish(db) == wish:
                _keep(db, _next(wish))

    def note(self, fact: LastLook | Need) -> None:
        with self._database.writing() as db:
            _keep(db, fact)

    def _is_held(self, db: Connection) -> bool:
        held = db.execute(select(trigger_run)).one_or_none()
        return held is not None and is_held(self._database, db, held)

    def _is_lost(self, db: Connection) -> bool:
        last = _fact(db, LastRun)
        return last is not None and last.ended_ms is None and not self._is_held(db)


def _domains(db: Connection) -> dict[str, State]:
    found = db.execute(select(trigger_domains).order_by(trigger_domains.c.domain))
    return {domain: STATE.validate_json(state) for domain, state in found}


def _changed(db: Connection, events: Mapping[str, Event]) -> dict[str, State]:
    before = _domains(db)
    after = {domain: step(before.get(domain, Ok()), event) for domain, event in events.items()}
    return {domain: state for domain, state in after.items() if state != before.get(domain, Ok())}


def _apply(db: Connection, events: Mapping[str, Event]) -> dict[str, State]:
    changed = _changed(db, events)
    for domain, state in changed.items():
        db.execute(delete(trigger_domains).where(trigger_domains.c.domain == domain))
        if not isinstance(state, Ok):
            db.execute(insert(trigger_domains).values(domain=domain, state=state.model_dump_json()))
    return changed


def _end_lost(db: Connection, at_ms: int) -> None:
    """End the last run as lost, if it has not ended."""
    last = _fact(db, LastRun)
    if last is not None and last.ended_ms is None:
        running = [domain for domain, state in _domains(db).items() if isinstance(state, Running)]
        _apply(db, dict.fromkeys(running, Lost(now_ms=at_ms, retry=last.retry)))
        _keep(db, last.model_copy(update={"ended_ms": at_ms, "outcome": "lost"}))


def _fact(db: Connection, kind: type[Fact]) -> Fact | None:
    of_kind = trigger_facts.c.name == kind.__name__
    body = db.execute(select(trigger_facts.c.body).where(of_kind)).scalar_one_or_none()
    return None if body is None else kind.model_validate_json(body)


def _keep(db: Connection, fact: Frozen) -> None:
    name = type(fact).__name__
    db.execute(delete(trigger_facts).where(trigger_facts.c.name == name))
    db.execute(insert(trigger_facts).values(name=name, body=fact.model_dump_json()))


def _wish(db: Connection) -> RunRequest:
    wish = _fact(db, RunRequest)
    if wish is None:
        wish = RunRequest(log=uuid.uuid4().hex[:12])
        _keep(db, wish)
    return wish


def _next(wish: RunRequest) -> RunRequest:
    return wish.model_copy(update={"number": wish.number + 1})
