"""The query log: a durable, ordered record of served requests, which windows of training data are claimed from.

One SQLite file in WAL mode. Rows are numbered by `seq`, and a number is never given twice, erased rows included. A
cursor says how far training has come; it only moves when a claimed window is committed. A claim belongs to an owner:
name it after one run, since the same name gets the same window back. The lease runs on the monotonic clock and a dead
process's claim is free at once, so neither a clock jump nor kill -9 trains a row twice or holds up the next run.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.consent import Consent, QueryRow, require_loggable
from infra.processes import process_identity, process_place

BUSY_TIMEOUT_S = 5.0
SCHEMA_VERSION = 1
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


class ErasedReport(BaseModel):
    """What an erasure removed.

    Attributes:
        rows: how many.
        seqs: their numbers, ascending.
        windows: the committed windows that had held any of them; snapshots made of these must be rewritten, and
            drafts that name them in their lineage saw the rows.
        wal_cleared: whether the write-ahead log was emptied. If a reader prevented it, erase again later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    seqs: tuple[int, ...]
    windows: tuple[Window, ...]
    wal_cleared: bool


class LogStats(BaseModel):
    """Counts for the dashboard; `depth` is of rows with full consent after the cursor, `bytes` of the files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: int
    total: int
    per_domain: dict[str, int]
    cursor: int
    dropped: int
    duplicates: int
    bytes: int


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

    def claim(self, owner: str, max_rows: int, min_rows: int = 1, lease_s: float = 3600.0) -> Window | None:
        """Claim the next rows with full consent after the cursor.

        An open claim is handed out again with the same range: to the same owner always, to another one when its lease
        is over or its process is gone.

        Args:
            owner: the run that will train on the window.
            max_rows: the window's largest size.
            min_rows: with fewer rows waiting, no window is opened.
            lease_s: seconds until another owner may take the claim over from a living process.

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
        return window

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
            db.execute("UPDATE counters SET value = ? WHERE name = 'cursor'", (window.last_seq,))
            db.execute("DELETE FROM claim")

    def release(self, window: Window) -> None:
        """Close the claim and leave the cursor, so that the rows can be claimed anew; ValueError if it is not open."""
        with self._transaction() as db:
            _require_open(db, window)
            db.execute("DELETE FROM claim")

    def rows(self, first_seq: int, last_seq: int, consent: Consent = "full") -> list[QueryRow]:
        """Return the rows of one consent level from `first_seq` to `last_seq`, both included, by seq."""
        return self._read("seq BETWEEN ? AND ? AND consent = ?", (first_seq, last_seq, consent))

    def latest(self, num_rows: int) -> list[QueryRow]:
        """Return the last rows, of any consent, by seq."""
        return self._read("seq IN (SELECT seq FROM rows ORDER BY seq DESC LIMIT ?)", (num_rows,))

    def replay(self, per_domain: int, before_seq: int, seed: int = 0) -> list[QueryRow]:
        """Return up to `per_domain` rows with full consent of each domain before `before_seq`, by seq.

        The rows with the smallest hashes of seed and id are taken: the same seed gives the same rows, and new rows
        only displace some of them.
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
        """Return the last seq of the last committed window, 0 before the first."""
        return _counter(self._connection(), "cursor")

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
                    f"""SELECT * FROM committed WHERE EXISTS (SELECT 1 FROM rows WHERE {condition}
                    AND consent = 'full' AND seq BETWEEN first_seq AND last_seq) ORDER BY first_seq""",
                    (value,),
                )
            ]
            db.execute(f"DELETE FROM rows WHERE {condition}", (value,))
            _shrink_claim(db)
        busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return ErasedReport(rows=len(seqs), seqs=seqs, windows=tuple(windows), wal_cleared=not busy)

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
                if (version := db.execute("PRAGMA user_version").fetchone()[0]) == 0:
                    db.executescript(SCHEMA)
                elif version != SCHEMA_VERSION:
                    raise ValueError(f"{self.path} has schema version {version}, wanted {SCHEMA_VERSION}")
            except BaseException:
                db.close()
                raise
            self._local.db = db
        return self._local.db

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
    return db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0]


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
    # Not the digest: rows of an open window may have been erased since it was handed out.
    opened = _open_window(db)
    place = (window.first_seq, window.last_seq, window.owner)
    if opened is None or (opened.first_seq, opened.last_seq, opened.owner) != place:
        held = "none is open" if opened is None else f"open is {opened.first_seq}-{opened.last_seq} of {opened.owner}"
        raise ValueError(f"window {window.first_seq}-{window.last_seq} of {window.owner} is not the open claim: {held}")


def _require_unheld(db: sqlite3.Connection, owner: str) -> None:
    holder, pid, process, lease_until_s = db.execute("SELECT owner, pid, process, lease_until_s FROM claim").fetchone()
    if holder != owner and time.monotonic() < lease_until_s and _is_running(pid, process):
        raise WindowBusy(f"the open window belongs to {holder} (process {pid})")


def _shrink_claim(db: sqlite3.Connection) -> None:
    """Bring the open claim up to date after an erasure; a claim left without rows is closed."""
    opened = _open_window(db)
    if opened is None:
        return
    window = _window(db, opened.first_seq, opened.last_seq, opened.owner)
    if window.num_rows:
        db.execute("UPDATE claim SET num_rows = ?, sha256 = ?", (window.num_rows, window.sha256))
    else:
        db.execute("DELETE FROM claim")


def _is_running(pid: int, process: str) -> bool:
    """Return whether the claiming process may still run; of another container only the lease can tell."""
    boot, namespace, _ = process.split(" ")
    own_boot, own_namespace = process_place().split(" ")
    if boot != own_boot or namespace != own_namespace:
        return boot == own_boot
    return process_identity(pid) == process
