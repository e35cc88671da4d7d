"""Windows of the query log: stretches of rows that are claimed, trained on, and committed or set aside.

A cursor says how far training has come; it only moves when a claimed window is committed or set aside. A claim belongs
to an owner: name it after one run, since the same name gets the same window back.

Each claim counts as an attempt when it is made, so that kill -9 counts too; when the third has failed the window is set
aside with its error. Its rows stay in the log and are used no more, since any of them may be what stopped it.

A claim ends with its process, which is seen at once where process ids can tell. They can't for another container of
the same machine, nor for a process that stands still: there the lease decides. It runs on the monotonic clock, and a
thread of the owner renews it (`hold`).
"""

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infra.identity import process_identity, process_place
from infra.logfile import LogFile, counter
from models.types import Frozen

LEASE_S, RENEWALS_PER_LEASE = 600.0, 10
MAX_ATTEMPTS, MAX_ERROR_CHARS = 3, 500


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
    def __init__(self, file: LogFile) -> None:
        self._file = file

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
        with self._file.transaction() as db:
            opened = _open_window(db)
            if opened is not None:
                query = "SELECT pid, process, lease_until_s FROM claim"
                if opened.owner != owner and _is_held(*(holder := db.execute(query).fetchone())):
                    raise WindowBusy(f"the open window belongs to {opened.owner} (process {holder[0]})")
                if _num_attempts(db, opened) >= MAX_ATTEMPTS:
                    _set_aside(db, opened)
                    opened = None
            if opened is not None:
                window = opened.model_copy(update={"owner": owner})
            else:
                query = "SELECT seq FROM rows WHERE consent = 'full' AND seq > ? ORDER BY seq LIMIT ?"
                seqs = [seq for (seq,) in db.execute(query, (counter(db, "cursor"), max_rows))]
                if len(seqs) < min_rows:
                    return None
                window = _window(db, seqs[0], seqs[-1], owner)
            pid = os.getpid()
            db.execute(
                "INSERT OR REPLACE INTO claim VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*window.model_dump().values(), pid, process_identity(pid), time.monotonic() + lease_s),
            )
            db.execute(
                "INSERT INTO attempts (first_seq, last_seq, number) VALUES (?, ?, ?)",
                (window.first_seq, window.last_seq, 1 + _num_attempts(db, window)),
            )
        return window

    @contextmanager
    def hold(self, window: Window, lease_s: float = LEASE_S) -> Iterator[None]:
        """Renew the lease of a claimed window from a thread for as long as the context lasts, or the claim does."""
        done = threading.Event()
        query = "UPDATE claim SET lease_until_s = ? WHERE first_seq = ? AND last_seq = ? AND owner = ?"

        def renew() -> None:
            try:
                while not done.wait(lease_s / RENEWALS_PER_LEASE):
                    # Locked or full: the next one comes before the lease ends.
                    with suppress(sqlite3.OperationalError), self._file.transaction() as db:
                        if not db.execute(query, (time.monotonic() + lease_s, *window.claimed)).rowcount:
                            return
            finally:
                self._file.close()

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def fail(self, window: Window, error: str) -> bool:
        """Record why it failed and release the window if it is this owner's; return whether it was set aside."""
        with self._file.transaction() as db:
            opened = _open_window(db)
            if opened is None or opened.claimed != window.claimed:
                return False
            number = _num_attempts(db, window)
            db.execute(
                "UPDATE attempts SET error = ? WHERE first_seq = ? AND last_seq = ? AND number = ?",
                (error[:MAX_ERROR_CHARS], window.first_seq, window.last_seq, number),
            )
            if number >= MAX_ATTEMPTS:
                _set_aside(db, opened)
                return True
            db.execute("UPDATE claim SET lease_until_s = 0")
            return False

    def withdraw(self, window: Window) -> None:
        """Release a window, if it is still this owner's, without counting the attempt."""
        with self._file.transaction() as db:
            opened = _open_window(db)
            if opened is not None and opened.claimed == window.claimed:
                place = (window.first_seq, window.last_seq, _num_attempts(db, window))
                db.execute("DELETE FROM attempts WHERE first_seq = ? AND last_seq = ? AND number = ?", place)
                db.execute("UPDATE claim SET lease_until_s = 0")

    def commit(self, window: Window) -> None:
        """Close the claim and move the cursor past the window; committing the same window again changes nothing.

        ValueError if the window is neither the open claim nor committed by this owner before.
        """
        with self._file.transaction() as db:
            again = "SELECT 1 FROM committed WHERE first_seq = ? AND last_seq = ? AND owner = ?"
            if db.execute(again, window.claimed).fetchone():
                return
            _require_open(db, window)
            db.execute("INSERT INTO committed VALUES (?, ?, ?, ?, ?)", tuple(window.model_dump().values()))
            _forget_attempts(db, window)
            _close_claim(db, cursor=window.last_seq)

    def release(self, window: Window) -> None:
        """Close the claim, and leave the rows as if never claimed; ValueError if the window is not the open claim."""
        with self._file.transaction() as db:
            _require_open(db, window)
            _forget_attempts(db, window)
            _close_claim(db)

    def cursor(self) -> int:
        """Return the last seq of the last window that was committed or set aside, 0 before the first."""
        return counter(self._file.connection(), "cursor")

    def last(self) -> Window | None:
        return _read_window(self._file.connection(), "SELECT * FROM committed ORDER BY first_seq DESC LIMIT 1")


def _window(db: sqlite3.Connection, first_seq: int, last_seq: int, owner: str) -> Window:
    digest, num_rows = hashlib.sha256(), 0
    query = "SELECT body FROM rows WHERE consent = 'full' AND seq BETWEEN ? AND ? ORDER BY seq"
    for (body,) in db.execute(query, (first_seq, last_seq)):
        digest.update(body.encode() + b"\n")
        num_rows += 1
    return Window(first_seq=first_seq, last_seq=last_seq, num_rows=num_rows, sha256=digest.hexdigest(), owner=owner)


def _open_window(db: sqlite3.Connection) -> Window | None:
    return _read_window(db, "SELECT first_seq, last_seq, num_rows, sha256, owner FROM claim")


def _read_window(db: sqlite3.Connection, query: str) -> Window | None:
    columns = db.execute(query).fetchone()
    return None if columns is None else Window(**dict(zip(Window.model_fields, columns, strict=True)))


def _require_open(db: sqlite3.Connection, window: Window) -> None:
    opened = _open_window(db)
    if opened is None or opened.claimed != window.claimed:
        held = "none is open" if opened is None else f"open is {opened.first_seq}-{opened.last_seq} of {opened.owner}"
        raise ValueError(f"window {window.first_seq}-{window.last_seq} of {window.owner} is not the open claim: {held}")


def _num_attempts(db: sqlite3.Connection, window: Window) -> int:
    query = "SELECT count(*) FROM attempts WHERE first_seq = ? AND last_seq = ?"
    return int(db.execute(query, (window.first_seq, window.last_seq)).fetchone()[0])


def _forget_attempts(db: sqlite3.Connection, window: Window) -> None:
    db.execute("DELETE FROM attempts WHERE first_seq = ? AND last_seq = ?", (window.first_seq, window.last_seq))


def _close_claim(db: sqlite3.Connection, cursor: int | None = None) -> None:
    db.execute("DELETE FROM claim")
    if cursor is not None:
        db.execute("UPDATE counters SET value = ? WHERE name = 'cursor'", (cursor,))


def _set_aside(db: sqlite3.Connection, window: Window) -> None:
    values = (*window.model_dump().values(), int(time.time() * 1000))
    db.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?, ?, ?)", values)
    db.execute("DELETE FROM regression_sets WHERE seq BETWEEN ? AND ?", (window.first_seq, window.last_seq))
    _close_claim(db, cursor=window.last_seq)


def attempt_at(db: sqlite3.Connection) -> Attempt | None:
    """Return the attempt at the open window; None if none is open."""
    query = """SELECT first_seq, last_seq, number, error, pid, process, lease_until_s
        FROM claim JOIN attempts USING (first_seq, last_seq) ORDER BY number DESC LIMIT 2"""
    found = db.execute(query).fetchall()
    if not found:
        return None
    first_seq, last_seq, number, _, *holder = found[0]
    running = _is_held(*holder)
    ended = [error for _, _, _, error, *_ in found[running:]]
    return Attempt(
        first_seq=first_seq, last_seq=last_seq, number=number, running=running, error=ended[0] if ended else ""
    )


def windows_set_aside(db: sqlite3.Connection) -> tuple[SetAside, ...]:
    # Beside max(), SQLite takes the other columns from the row that has the maximum.
    query = """SELECT first_seq, last_seq, num_rows, max(number), time_ms, error
        FROM set_aside JOIN attempts USING (first_seq, last_seq) GROUP BY first_seq, last_seq ORDER BY first_seq"""
    return tuple(SetAside(**dict(zip(SetAside.model_fields, columns, strict=True))) for columns in db.execute(query))


def shrink_claim(db: sqlite3.Connection) -> None:
    """Bring the open claim up to date after an erasure; a claim left without rows is closed."""
    opened = _open_window(db)
    if opened is None:
        return
    window = _window(db, opened.first_seq, opened.last_seq, opened.owner)
    if window.num_rows:
        db.execute("UPDATE claim SET num_rows = ?, sha256 = ?", (window.num_rows, window.sha256))
    else:
        _forget_attempts(db, window)
        _close_claim(db)


def _is_held(pid: int, process: str, lease_until_s: float) -> bool:
    """Return whether the claiming process may still run; of another container only the lease can tell."""
    if time.monotonic() >= lease_until_s:
        return False
    boot, namespace, _ = process.split(" ")
    own_boot, own_namespace = process_place().split(" ")
    if boot != own_boot or namespace != own_namespace:
        return boot == own_boot
    return process_identity(pid) == process
