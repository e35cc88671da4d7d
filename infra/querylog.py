"""The query log: a durable, ordered record of served requests, which windows of training data are claimed from.

One SQLite file in WAL mode. Rows are numbered by `seq`, and a number is never given twice, erased rows included. A
cursor says how far training has come; it only moves when a claimed window is committed or set aside. A claim belongs to
an owner: name it after one run, since the same name gets the same window back.

A window is tried three times. Each claim of it counts as an attempt when it is made, so that kill -9 counts too; when
the third has failed it is set aside with its error, the cursor moves past it, and later windows train. Its rows stay in
the log, and `replay` mixes them into later windows like any older row.

A claim ends with its process, which is seen at once where process ids can tell. They can't for another container of
the same machine, nor for a process that stands still: there the lease decides. It runs on the monotonic clock, and a
thread of the owner renews it (`hold`), so that no run is too long for it.

Rows are written with full durability, and erased text is overwritten in the file (secure_delete). Text of a row whose
consent is not "full" is refused here, whatever the caller did before.
"""

import hashlib
import heapq
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.consent import Consent, QueryRow, require_loggable
from infra.processes import process_identity, process_place

BUSY_TIMEOUT_S = 5.0
LEASE_S = 600.0
RENEWALS_PER_LEASE = 10
MAX_ATTEMPTS = 3
MAX_ERROR_CHARS = 500
ENDED = "the process ended before it said why"
ERASED = "the error was erased with rows of the window"
# A version only adds tables to the one before, empty ones: the schema brings any older log up to date, and needs no
# backup for it.
SCHEMA_VERSION = 2
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS rows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, time_ms INTEGER NOT NULL, subject TEXT,
    domain TEXT NOT NULL, consent TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS rows_by_domain ON rows (domain, consent, seq);
CREATE INDEX IF NOT EXISTS rows_by_subject ON rows (subject);
CREATE INDEX IF NOT EXISTS rows_by_time ON rows (time_ms);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS claim (
    one INTEGER PRIMARY KEY CHECK (one = 1), first_seq INTEGER, last_seq INTEGER, num_rows INTEGER, sha256 TEXT,
    owner TEXT, pid INTEGER, process TEXT, lease_until_s REAL);
CREATE TABLE IF NOT EXISTS committed (
    first_seq INTEGER, last_seq INTEGER, num_rows INTEGER, sha256 TEXT, owner TEXT,
    PRIMARY KEY (first_seq, last_seq));
CREATE TABLE IF NOT EXISTS attempts (
    first_seq INTEGER, last_seq INTEGER, number INTEGER, error TEXT NOT NULL DEFAULT '{ENDED}',
    PRIMARY KEY (first_seq, last_seq, number));
CREATE TABLE IF NOT EXISTS set_aside (
    first_seq INTEGER, last_seq INTEGER, num_rows INTEGER, sha256 TEXT, owner TEXT, time_ms INTEGER NOT NULL,
    PRIMARY KEY (first_seq, last_seq));
INSERT OR IGNORE INTO counters VALUES ('cursor', 0), ('dropped', 0), ('duplicates', 0);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class WindowBusy(ValueError):
    """Another owner holds the open window."""


class Window(BaseModel):
    """A claimed stretch of rows with full consent; `sha256` is over their content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_seq: int
    last_seq: int
    num_rows: int
    sha256: str
    owner: str


class Attempt(BaseModel):
    """The attempt at the open window, and what became of the one before.

    Attributes:
        number: from 1.
        running: whether its owner still holds the window.
        error: why the last attempt that ended failed; "" while the first one runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_seq: int
    last_seq: int
    number: int
    running: bool
    error: str


class SetAside(BaseModel):
    """A window that no attempt got through.

    Attributes:
        num_rows: how many it had when it was claimed last.
        num_attempts: how often it was tried.
        time_ms: when it was set aside, in Unix time.
        error: of the last attempt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_seq: int
    last_seq: int
    num_rows: int
    num_attempts: int
    time_ms: int
    error: str


class ErasedReport(BaseModel):
    """What an erasure removed.

    Attributes:
        rows: how many.
        seqs: their numbers, ascending.
        windows: the windows, committed or set aside, that had held any of them; snapshots made of these must be
            rewritten, and drafts that name them in their lineage saw the rows.
        wal_cleared: whether the write-ahead log was emptied. If a reader prevented it, erase again later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    seqs: tuple[int, ...]
    windows: tuple[Window, ...]
    wal_cleared: bool


class LogStats(BaseModel):
    """What the log holds, for the dashboard.

    Attributes:
        depth: rows with full consent after the cursor.
        bytes: of the files.
        attempt: at the open window; None if none is open.
        set_aside: windows that no attempt got through, oldest first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: int
    total: int
    per_domain: dict[str, int]
    cursor: int
    dropped: int
    duplicates: int
    bytes: int
    attempt: Attempt | None
    set_aside: tuple[SetAside, ...]


class QueryLog:
    """The log in one SQLite file, made at first use. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()

    def append(self, rows: Sequence[QueryRow], dropped: int = 0) -> int:
        """Write rows in one transaction; a row whose id is there already is left out and counted.

        Args:
            rows: without `seq`.
            dropped: rows lost before they came here, added to the persistent count.

        Returns:
            How many rows were new.

        Raises:
            ValueError: a row may not be written (`require_loggable`); then none is.
            sqlite3.Error: the database is locked, full or broken; then none is.
        """
        for row in rows:
            require_loggable(row)
        with self._transaction() as db:
            num_new = 0
            for row in rows:
                body = json.dumps(row.model_dump(exclude={"seq"}), ensure_ascii=False, allow_nan=False)
                num_new += db.execute(
                    "INSERT OR IGNORE INTO rows (id, time_ms, subject, domain, consent, body)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (row.id, row.time_ms, row.subject, row.domain, row.consent, body),
                ).rowcount
            _count(db, "duplicates", len(rows) - num_new)
            _count(db, "dropped", dropped)
        return num_new

    def claim(self, owner: str, max_rows: int, min_rows: int = 1, lease_s: float = LEASE_S) -> Window | None:
        """Claim the next rows with full consent after the cursor, and count an attempt at them.

        An open claim is handed out again with the same range: to the same owner always, to another one when it failed,
        its process is gone or its lease is over. A window that had its attempts is set aside instead.

        Args:
            owner: the run that will train on the window.
            max_rows: the window's largest size.
            min_rows: with fewer rows waiting, no window is opened.
            lease_s: seconds until another owner may take the claim over from a living process that doesn't renew it.

        Returns:
            The window, or None if fewer than `min_rows` rows wait.

        Raises:
            WindowBusy: another owner's claim is in force.
            ValueError: not 1 <= min_rows <= max_rows.
        """
        if not 1 <= min_rows <= max_rows:
            raise ValueError(f"got min_rows {min_rows} and max_rows {max_rows}, wanted 1 <= min_rows <= max_rows")
        with self._transaction() as db:
            opened = _open_window(db)
            if opened is not None:
                _require_unheld(db, owner)
                if _num_attempts(db, opened) >= MAX_ATTEMPTS:
                    _set_aside(db, opened)
                    opened = None
            if opened is not None:
                window = opened.model_copy(update={"owner": owner})
            else:
                query = "SELECT seq FROM rows WHERE consent = 'full' AND seq > ? ORDER BY seq LIMIT ?"
                seqs = [seq for (seq,) in db.execute(query, (_counter(db, "cursor"), max_rows))]
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

        def renew() -> None:
            try:
                while not done.wait(lease_s / RENEWALS_PER_LEASE):
                    with suppress(sqlite3.OperationalError):  # locked or full: the next one comes before the lease ends
                        if not self._renew(window, lease_s):
                            return
            finally:
                self.close()

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def fail(self, window: Window, error: str) -> bool:
        """Record why an attempt failed, and let go of the window: the next run gets it, or the rows after it.

        Of a window that is no longer this owner's nothing is recorded.

        Args:
            window: as it was claimed.
            error: one line; only its first 500 characters are kept. It goes when rows of the window are erased, since
                it may quote them.

        Returns:
            whether this was its last attempt, and it was set aside.
        """
        with self._transaction() as db:
            opened = _open_window(db)
            if opened is None or not _same_claim(opened, window):
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
        """Let go of a window without counting the attempt: the next run gets it.

        Nothing is done about a window that is no longer this owner's.
        """
        with self._transaction() as db:
            opened = _open_window(db)
            if opened is not None and _same_claim(opened, window):
                place = (window.first_seq, window.last_seq, _num_attempts(db, window))
                db.execute("DELETE FROM attempts WHERE first_seq = ? AND last_seq = ? AND number = ?", place)
                db.execute("UPDATE claim SET lease_until_s = 0")

    def commit(self, window: Window) -> None:
        """Close the claim and move the cursor past the window; committing the same window again changes nothing.

        Raises:
            ValueError: the window is neither the open claim nor committed by this owner before.
        """
        place = (window.first_seq, window.last_seq, window.owner)
        with self._transaction() as db:
            again = "SELECT 1 FROM committed WHERE first_seq = ? AND last_seq = ? AND owner = ?"
            if db.execute(again, place).fetchone():
                return
            _require_open(db, window)
            db.execute("INSERT INTO committed VALUES (?, ?, ?, ?, ?)", tuple(window.model_dump().values()))
            _forget_attempts(db, window)
            _close_claim(db, cursor=window.last_seq)

    def release(self, window: Window) -> None:
        """Close the claim and leave the cursor, so that the rows can be claimed anew, their attempts counted from one.

        Raises:
            ValueError: the window is not the open claim.
        """
        with self._transaction() as db:
            _require_open(db, window)
            _forget_attempts(db, window)
            _close_claim(db)

    def rows(self, first_seq: int, last_seq: int, consent: Consent = "full") -> list[QueryRow]:
        """Return the rows of one consent level from `first_seq` to `last_seq`, both included, by seq."""
        return self._read("seq BETWEEN ? AND ? AND consent = ?", (first_seq, last_seq, consent))

    def latest(self, num_rows: int) -> list[QueryRow]:
        """Return the last rows, of any consent, by seq."""
        return self._read("seq IN (SELECT seq FROM rows ORDER BY seq DESC LIMIT ?)", (num_rows,))

    def replay(self, per_domain: int, before_seq: int, seed: int = 0) -> list[QueryRow]:
        """Return up to `per_domain` rows with full consent of each domain before `before_seq`, by seq.

        The rows with the smallest hashes of seed and id are taken: the same seed gives the same rows, and new rows
        only displace some of them. Rows of windows that were set aside are among them: this is how they come back.
        """
        hashed: dict[str, list[tuple[bytes, int]]] = {}
        query = "SELECT domain, id, seq FROM rows WHERE consent = 'full' AND seq < ?"
        for domain, row_id, seq in self._connection().execute(query, (before_seq,)):
            key = hashlib.sha256(f"{seed} {row_id}".encode()).digest()
            hashed.setdefault(domain, []).append((key, seq))
        seqs = [seq for keys in hashed.values() for _, seq in heapq.nsmallest(per_domain, keys)]
        return self._read("seq IN (SELECT value FROM json_each(?))", (json.dumps(seqs),))

    def erase(self, subject: str) -> ErasedReport:
        """Delete every row of a hashed subject, from the file's free pages and its write-ahead log too."""
        return self._erase("subject = ?", subject)

    def erase_older_than(self, time_ms: int) -> ErasedReport:
        """Delete every row served before `time_ms`, in the same way."""
        return self._erase("time_ms < ?", time_ms)

    def cursor(self) -> int:
        """Return the last seq of the last window that was committed or set aside, 0 before the first."""
        return _counter(self._connection(), "cursor")

    def waiting(self) -> tuple[dict[str, Counter[Consent]], int | None]:
        """Return domain to the number of rows after the cursor, by consent, and when the first of them was served."""
        counts: dict[str, Counter[Consent]] = {}
        first_ms: int | None = None
        query = "SELECT domain, consent, count(*), min(time_ms) FROM rows WHERE seq > ? GROUP BY domain, consent"
        for domain, consent, number, served_ms in self._connection().execute(query, (self.cursor(),)):
            counts.setdefault(domain, Counter())[consent] = number
            first_ms = served_ms if first_ms is None else min(first_ms, served_ms)
        return counts, first_ms

    def stats(self) -> LogStats:
        """Count what the log holds."""
        db = self._connection()
        cursor = _counter(db, "cursor")
        depth = db.execute("SELECT count(*) FROM rows WHERE consent = 'full' AND seq > ?", (cursor,)).fetchone()[0]
        per_domain = dict(db.execute("SELECT domain, count(*) FROM rows GROUP BY domain ORDER BY domain").fetchall())
        files = [self.path, self.path.with_name(self.path.name + "-wal")]
        return LogStats(
            depth=depth,
            total=sum(per_domain.values()),
            per_domain=per_domain,
            cursor=cursor,
            dropped=_counter(db, "dropped"),
            duplicates=_counter(db, "duplicates"),
            bytes=sum(file.stat().st_size for file in files if file.exists()),
            attempt=_attempt(db),
            set_aside=_windows_set_aside(db),
        )

    def close(self) -> None:
        """Close the calling thread's connection; the next use opens it again."""
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    def _erase(self, condition: str, value: str | int) -> ErasedReport:
        with self._transaction() as db:
            found = db.execute(f"SELECT seq FROM rows WHERE {condition} ORDER BY seq", (value,)).fetchall()
            seqs = tuple(seq for (seq,) in found)
            windows = [
                Window(**dict(zip(Window.model_fields, columns, strict=True)))
                for columns in db.execute(
                    f"""WITH windows AS (SELECT * FROM committed
                    UNION ALL SELECT first_seq, last_seq, num_rows, sha256, owner FROM set_aside)
                    SELECT * FROM windows WHERE EXISTS (SELECT 1 FROM rows WHERE {condition}
                    AND consent = 'full' AND seq BETWEEN first_seq AND last_seq) ORDER BY first_seq""",
                    (value,),
                )
            ]
            db.execute(
                f"""UPDATE attempts SET error = '{ERASED}' WHERE error != '{ENDED}' AND EXISTS
                (SELECT 1 FROM rows WHERE {condition} AND seq BETWEEN first_seq AND last_seq)""",
                (value,),
            )
            db.execute(f"DELETE FROM rows WHERE {condition}", (value,))
            _shrink_claim(db)
        busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return ErasedReport(rows=len(seqs), seqs=seqs, windows=tuple(windows), wal_cleared=not busy)

    def _renew(self, window: Window, lease_s: float) -> bool:
        """Put the end of the lease off; False if the window is no longer this owner's."""
        until_s, place = time.monotonic() + lease_s, (window.first_seq, window.last_seq, window.owner)
        query = "UPDATE claim SET lease_until_s = ? WHERE first_seq = ? AND last_seq = ? AND owner = ?"
        with self._transaction() as db:
            return db.execute(query, (until_s, *place)).rowcount == 1

    def _read(self, condition: str, values: tuple[object, ...]) -> list[QueryRow]:
        query = f"SELECT seq, body FROM rows WHERE {condition} ORDER BY seq"
        return [QueryRow(seq=seq, **json.loads(body)) for seq, body in self._connection().execute(query, values)]

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "db"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA secure_delete = ON")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise ValueError(f"{self.path} has schema version {version}, wanted at most {SCHEMA_VERSION}")
                if version < SCHEMA_VERSION:
                    db.executescript(SCHEMA)
            except BaseException:
                db.close()
                raise
            self._local.db = db
        local: sqlite3.Connection = self._local.db
        return local

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._connection()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk makes SQLite roll back by itself
                db.execute("ROLLBACK")
            raise


def _counter(db: sqlite3.Connection, name: str) -> int:
    value: int = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0]
    return value


def _count(db: sqlite3.Connection, name: str, amount: int) -> None:
    if amount:
        db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (amount, name))


def _window(db: sqlite3.Connection, first_seq: int, last_seq: int, owner: str) -> Window:
    digest, num_rows = hashlib.sha256(), 0
    query = "SELECT body FROM rows WHERE consent = 'full' AND seq BETWEEN ? AND ? ORDER BY seq"
    for (body,) in db.execute(query, (first_seq, last_seq)):
        digest.update(body.encode() + b"\n")
        num_rows += 1
    return Window(first_seq=first_seq, last_seq=last_seq, num_rows=num_rows, sha256=digest.hexdigest(), owner=owner)


def _open_window(db: sqlite3.Connection) -> Window | None:
    columns = db.execute("SELECT first_seq, last_seq, num_rows, sha256, owner FROM claim").fetchone()
    return None if columns is None else Window(**dict(zip(Window.model_fields, columns, strict=True)))


def _require_open(db: sqlite3.Connection, window: Window) -> None:
    opened = _open_window(db)
    if opened is None or not _same_claim(opened, window):
        held = "none is open" if opened is None else f"open is {opened.first_seq}-{opened.last_seq} of {opened.owner}"
        raise ValueError(f"window {window.first_seq}-{window.last_seq} of {window.owner} is not the open claim: {held}")


def _same_claim(opened: Window, window: Window) -> bool:
    # Not the digest: rows of an open window may have been erased since it was handed out.
    place = (window.first_seq, window.last_seq, window.owner)
    return (opened.first_seq, opened.last_seq, opened.owner) == place


def _require_unheld(db: sqlite3.Connection, owner: str) -> None:
    holder, pid, process, lease_until_s = db.execute("SELECT owner, pid, process, lease_until_s FROM claim").fetchone()
    if holder != owner and _is_held(pid, process, lease_until_s):
        raise WindowBusy(f"the open window belongs to {holder} (process {pid})")


def _is_held(pid: int, process: str, lease_until_s: float) -> bool:
    return time.monotonic() < lease_until_s and _is_running(pid, process)


def _num_attempts(db: sqlite3.Connection, window: Window) -> int:
    query = "SELECT count(*) FROM attempts WHERE first_seq = ? AND last_seq = ?"
    number: int = db.execute(query, (window.first_seq, window.last_seq)).fetchone()[0]
    return number


def _forget_attempts(db: sqlite3.Connection, window: Window) -> None:
    db.execute("DELETE FROM attempts WHERE first_seq = ? AND last_seq = ?", (window.first_seq, window.last_seq))


def _close_claim(db: sqlite3.Connection, cursor: int | None = None) -> None:
    db.execute("DELETE FROM claim")
    if cursor is not None:
        db.execute("UPDATE counters SET value = ? WHERE name = 'cursor'", (cursor,))


def _set_aside(db: sqlite3.Connection, window: Window) -> None:
    values = (*window.model_dump().values(), int(time.time() * 1000))
    db.execute("INSERT INTO set_aside VALUES (?, ?, ?, ?, ?, ?)", values)
    _close_claim(db, cursor=window.last_seq)


def _attempt(db: sqlite3.Connection) -> Attempt | None:
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


def _windows_set_aside(db: sqlite3.Connection) -> tuple[SetAside, ...]:
    # Beside max(), SQLite takes the other columns from the row that has the maximum.
    query = """SELECT first_seq, last_seq, num_rows, max(number), time_ms, error
        FROM set_aside JOIN attempts USING (first_seq, last_seq) GROUP BY first_seq, last_seq ORDER BY first_seq"""
    return tuple(SetAside(**dict(zip(SetAside.model_fields, columns, strict=True))) for columns in db.execute(query))


def _shrink_claim(db: sqlite3.Connection) -> None:
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


def _is_running(pid: int, process: str) -> bool:
    """Return whether the claiming process may still run; of another container only the lease can tell."""
    boot, namespace, _ = process.split(" ")
    own_boot, own_namespace = process_place().split(" ")
    if boot != own_boot or namespace != own_namespace:
        return boot == own_boot
    return process_identity(pid) == process
