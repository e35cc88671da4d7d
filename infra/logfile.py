"""The query log's file: one SQLite database in WAL mode, with its schema and its transactions.

Rows, windows and what stands beside them each have a module of their own over the same file. Everything is written with
full durability, and erased text is overwritten in the file (secure_delete).
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY_TIMEOUT_S = 5.0
ENDED = "the process ended before it said why"
# A version only adds tables to the one before, empty ones: the schema brings any older log up to date, and needs no
# backup for it.
SCHEMA_VERSION = 3
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
CREATE TABLE IF NOT EXISTS sketches (
    seq INTEGER PRIMARY KEY REFERENCES rows ON DELETE CASCADE, secret TEXT NOT NULL, turn BLOB NOT NULL,
    grams BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS probes (seq INTEGER PRIMARY KEY REFERENCES rows ON DELETE CASCADE);
INSERT OR IGNORE INTO counters VALUES ('cursor', 0), ('dropped', 0), ('duplicates', 0);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class LogFile:
    """One SQLite file, made at first use. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()

    def close(self) -> None:
        """Close the calling thread's connection; the next use opens it again."""
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    def connection(self) -> sqlite3.Connection:
        """Return the calling thread's connection; ValueError if the file is of a newer schema."""
        if not hasattr(self._local, "db"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA secure_delete = ON")
                db.execute("PRAGMA foreign_keys = ON")
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
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin to write; what the block did holds if it ends, and is undone if it raises."""
        db = self.connection()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk makes SQLite roll back by itself
                db.execute("ROLLBACK")
            raise


def counter(db: sqlite3.Connection, name: str) -> int:
    """Return what a counter of the log stands at."""
    value: int = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0]
    return value


def count(db: sqlite3.Connection, name: str, amount: int) -> None:
    """Add to a counter."""
    if amount:
        db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (amount, name))
