"""Windows of the query log: stretches of rows that are claimed, trained on, and committed or set aside.

A cursor says how far training has come; it only moves when a claimed window is committed or set aside. A claim belongs
to an owner: name it after one run, since the same name gets the same window back.

Each claim counts as an attempt when it is made, so that kill -9 counts too; when the third has failed the window is set
aside with its error. Its rows stay in the log and are used no more, since any of them may be what stopped it.

A claim is a lease (infra/database.py): it ends with its process, and the owner renews it (`hold`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, update

from infra import tables
from infra.database import LEASE_S, STREAMED, Database, is_held, lease, renewing
from models.types import Frozen

MAX_ATTEMPTS, MAX_ERROR_CHARS = 3, 500
ROW, CLAIM, ATTEMPT = tables.rows.c, tables.claim.c, tables.attempts.c
OPEN = select(CLAIM.first_seq, CLAIM.last_seq, CLAIM.num_rows, CLAIM.sha256, CLAIM.owner)
HOLDER = select(CLAIM.pid, CLAIM.process, CLAIM.lease_until_ms)


class WindowBusy(ValueError):
    """Another owner holds the open window."""


class Window(Frozen):
    """A claimed stretch of rows with full consent; `sha256` is over their content."""

    first_seq: int
    last_seq: int
    num_rows: int
    sha256: str
    owner: str

    @property
    def claimed(self) -> tuple[int, int, str]:
        """What makes it one claim: not the digest, since rows may have been erased while it is open."""
        return self.first_seq, self.last_seq, self.owner


class Attempt(Frozen):
    """The attempt at the open window, from 1, and why the last one that ended failed."""

    first_seq: int
    last_seq: int
    number: int
    running: bool
    error: str


class SetAside(Frozen):
    """A window that no attempt got through."""

    first_seq: int
    last_seq: int
    num_rows: int
    num_attempts: int
    time_ms: int
    error: str


class Windows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, owner: str, max_rows: int, min_rows: int = 1, lease_s: float = LEASE_S) -> Window | None:
        """Claim up to `max_rows` rows with full consent after the cursor, and count an attempt at them.

        An open claim is handed out again with the same range: to the same owner always, to another one when it failed,
        its process is gone or its lease is over. None if fewer than `min_rows` rows wait.

        Raises:
            WindowBusy: another owner's claim is in force.
            ValueError: not 1 <= min_rows <= max_rows.
        """
        if not 1 <= min_rows <= max_rows:
            raise ValueError(f"got min_rows {min_rows} and max_rows {max_rows}, wanted 1 <= min_rows <= max_rows")
        with self._database.writing() as connection:
            opened = _open_window(connection)
            if opened is not None:
                if opened.owner != owner and self._is_held(connection):
                    pid = connection.execute(HOLDER).one().pid
                    raise WindowBusy(f"the open window belongs to {opened.owner} (process {pid})")
                if _num_attempts(connection, opened) >= MAX_ATTEMPTS:
                    self._set_aside(connection, opened)
                    opened = None
            if opened is not None:
                window = opened.model_copy(update={"owner": owner})
            else:
                waiting = select(ROW.seq).where(ROW.consent == "full", ROW.seq > _cursor(connection))
                seqs = connection.scalars(waiting.order_by(ROW.seq).limit(max_rows)).all()
                if len(seqs) < min_rows:
                    return None
                window = _window(connection, seqs[0], seqs[-1], owner)
            connection.execute(delete(tables.claim))
            connection.execute(insert(tables.claim), window.model_dump() | lease(self._database, connection, lease_s))
            place = {"first_seq": window.first_seq, "last_seq": window.last_seq}
            number = 1 + _num_attempts(connection, window)
            connection.execute(insert(tables.attempts), place | {"number": number})
        return window

    @contextmanager
    def hold(self, window: Window, lease_s: float = LEASE_S) -> Iterator[None]:
        """Renew the lease of a claimed window from a thread for as long as the context lasts, or the claim does."""
        first_seq, last_seq, owner = window.claimed
        mine = (CLAIM.first_seq == first_seq) & (CLAIM.last_seq == last_seq) & (CLAIM.owner == owner)

        def renew() -> bool:
            with self._database.writing() as connection:
                until_ms = lease(self._database, connection, lease_s)["lease_until_ms"]
                renewed = update(tables.claim).where(mine).values(lease_until_ms=until_ms)
                return bool(connection.execute(renewed).rowcount)

        with renewing(renew, lease_s):
            yield

    def fail(self, window: Window, error: str) -> bool:
        """Record why it failed and release the window if it is this owner's; return whether it was set aside."""
        with self._database.writing() as connection:
            opened = _open_window(connection)
            if opened is None or opened.claimed != window.claimed:
                return False
            number = _num_attempts(connection, window)
            this = _of(window) & (ATTEMPT.number == number)
            connection.execute(update(tables.attempts).where(this).values(error=error[:MAX_ERROR_CHARS]))
            if number >= MAX_ATTEMPTS:
                self._set_aside(connection, opened)
                return True
            connection.execute(update(tables.claim).values(lease_until_ms=0))
            return False

    def withdraw(self, window: Window) -> None:
        """Release a window, if it is still this owner's, without counting the attempt."""
        with self._database.writing() as connection:
            opened = _open_window(connection)
            if opened is not None and opened.claimed == window.claimed:
                this = _of(window) & (ATTEMPT.number == _num_attempts(connection, window))
                connection.execute(delete(tables.attempts).where(this))
                connection.execute(update(tables.claim).values(lease_until_ms=0))

    def commit(self, window: Window) -> None:
        """Close the claim and move the cursor past the window; committing the same window again changes nothing.

        ValueError if the window is neither the open claim nor committed by this owner before.
        """
        ended, (first_seq, last_seq, owner) = tables.committed.c, window.claimed
        again = (ended.first_seq == first_seq) & (ended.last_seq == last_seq) & (ended.owner == owner)
        with self._database.writing() as connection:
            if connection.execute(select(ended.owner).where(again)).one_or_none():
                return
            _require_open(connection, window)
            connection.execute(insert(tables.committed), window.model_dump())
            _forget_attempts(connection, window)
            _close_claim(connection, cursor=window.last_seq)

    def release(self, window: Window) -> None:
        """Close the claim, and leave the rows as if never claimed; ValueError if the window is not the open claim."""
        with self._database.writing() as connection:
            _require_open(connection, window)
            _forget_attempts(connection, window)
            _close_claim(connection)

    def cursor(self) -> int:
        """Return the last seq of the last window that was committed or set aside, 0 before the first."""
        with self._database.reading() as connection:
            return _cursor(connection)

    def last(self) -> Window | None:
        ended = select(*(tables.committed.c[name] for name in Window.model_fields))
        with self._database.reading() as connection:
            return _read_window(connection, ended.order_by(tables.committed.c.first_seq.desc()).limit(1))

    def attempt(self, connection: Connection) -> Attempt | None:
        """Return the attempt at the open window; None if none is open, or its only one was withdrawn."""
        opened = _open_window(connection)
        if opened is None:
            return None
        newest = select(ATTEMPT.number, ATTEMPT.error).where(_of(opened)).order_by(ATTEMPT.number.desc()).limit(2)
        if not (found := connection.execute(newest).all()):
            return None
        running = self._is_held(connection)
        ended = [error for _, error in found[running:]]
        return Attempt(
            first_seq=opened.first_seq,
            last_seq=opened.last_seq,
            number=found[0].number,
            running=running,
            error=ended[0] if ended else "",
        )

    def set_aside(self, connection: Connection) -> tuple[SetAside, ...]:
        aside = tables.set_aside.c
        same = (ATTEMPT.first_seq == aside.first_seq) & (ATTEMPT.last_seq == aside.last_seq)
        last = select(func.max(ATTEMPT.number)).where(same).correlate(tables.set_aside).scalar_subquery()
        found = (
            select(*(aside[name] for name in ("first_seq", "last_seq", "num_rows", "time_ms")), ATTEMPT.error)
            .add_columns(ATTEMPT.number.label("num_attempts"))
            .join_from(tables.set_aside, tables.attempts, same & (ATTEMPT.number == last))
        )
        return tuple(SetAside(**one) for one in connection.execute(found.order_by(aside.first_seq)).mappings())

    def _set_aside(self, connection: Connection, window: Window) -> None:
        now_ms, members = self._database.now_ms(connection), tables.regression_sets
        connection.execute(insert(tables.set_aside), window.model_dump() | {"time_ms": now_ms})
        connection.execute(delete(members).where(members.c.seq.between(window.first_seq, window.last_seq)))
        _close_claim(connection, cursor=window.last_seq)

    def _is_held(self, connection: Connection) -> bool:
        return is_held(self._database, connection, connection.execute(HOLDER).one())


def shrink_claim(connection: Connection) -> None:
    """Bring the open claim up to date after an erasure; a claim left without rows is closed."""
    opened = _open_window(connection)
    if opened is None:
        return
    window = _window(connection, opened.first_seq, opened.last_seq, opened.owner)
    if window.num_rows:
        connection.execute(update(tables.claim).values(num_rows=window.num_rows, sha256=window.sha256))
    else:
        _forget_attempts(connection, window)
        _close_claim(connection)


def _window(connection: Connection, first_seq: int, last_seq: int, owner: str) -> Window:
    digest, num_rows = hashlib.sha256(), 0
    inside = (ROW.consent == "full") & ROW.seq.between(first_seq, last_seq)
    found = select(tables.bodies.c.body).select_from(tables.WITH_BODY).where(inside).order_by(ROW.seq)
    for body in connection.scalars(found.execution_options(yield_per=STREAMED)):
        digest.update(body.encode() + b"\n")
        num_rows += 1
    return Window(first_seq=first_seq, last_seq=last_seq, num_rows=num_rows, sha256=digest.hexdigest(), owner=owner)


def _cursor(connection: Connection) -> int:
    counters = tables.counters.c
    return int(connection.execute(select(counters.value).where(counters.name == "cursor")).scalar_one())


def _open_window(connection: Connection) -> Window | None:
    return _read_window(connection, OPEN)


def _read_window(connection: Connection, query: Select[Any]) -> Window | None:
    found = connection.execute(query).mappings().one_or_none()
    return None if found is None else Window(**found)


def _require_open(connection: Connection, window: Window) -> None:
    opened = _open_window(connection)
    if opened is None or opened.claimed != window.claimed:
        held = "none is open" if opened is None else f"open is {opened.first_seq}-{opened.last_seq} of {opened.owner}"
        raise ValueError(f"window {window.first_seq}-{window.last_seq} of {window.owner} is not the open claim: {held}")


def _of(window: Window) -> ColumnElement[bool]:
    """The condition for the attempts at a window."""
    return (ATTEMPT.first_seq == window.first_seq) & (ATTEMPT.last_seq == window.last_seq)


def _num_attempts(connection: Connection, window: Window) -> int:
    return connection.execute(select(func.count()).select_from(tables.attempts).where(_of(window))).scalar_one()


def _forget_attempts(connection: Connection, window: Window) -> None:
    connection.execute(delete(tables.attempts).where(_of(window)))


def _close_claim(connection: Connection, cursor: int | None = None) -> None:
    connection.execute(delete(tables.claim))
    if cursor is not None:
        change = update(tables.counters).where(tables.counters.c.name == "cursor")
        connection.execute(change.values(value=cursor))
