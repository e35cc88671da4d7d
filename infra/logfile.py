"""The query log's file: one SQLite database in WAL mode, with its schema and its transactions.

Everything is written with full durability, and erased text is overwritten in the file (secure_delete). Text of a row
whose consent is not "full" is refused here, whatever the caller did before.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from infra.consent import QueryRow, require_loggable
from infra.files import lock_file, replacing
from infra.home import OTHER_FORMAT

BUSY_TIMEOUT_S = 5.0
ENDED = "the process ended before it said why"
SCHEMA_VERSION = 7
TORN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, time_ms INTEGER NOT NULL, subject TEXT,
    domain TEXT NOT NULL, consent TEXT NOT NULL, body TEXT NOT NULL, group_hash TEXT, server TEXT);
CREATE INDEX IF NOT EXISTS rows_by_domain ON rows (domain, consent, seq);
CREATE INDEX IF NOT EXISTS rows_by_server ON rows (server, json_extract(body, '$.draft_version'), seq)
    WHERE server IS NOT NULL;
CREATE INDEX IF NOT EXISTS rows_by_subject ON rows (subject);
CREATE INDEX IF NOT EXISTS rows_with_aliases ON rows (seq) WHERE json_extract(body, '$.aliases') IS NOT NULL;
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
CREATE TABLE IF NOT EXISTS regression_sets (seq INTEGER PRIMARY KEY REFERENCES rows ON DELETE CASCADE);
CREATE TABLE IF NOT EXISTS reads (
    seq INTEGER NOT NULL, snapshot TEXT NOT NULL, role TEXT NOT NULL, PRIMARY KEY (seq, snapshot, role)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS erasures (
    number INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, certificate TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS erasing (
    seq INTEGER PRIMARY KEY, erasure INTEGER NOT NULL REFERENCES erasures, id TEXT NOT NULL, consent TEXT NOT NULL,
    body TEXT NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('cursor', 0), ('dropped', 0), ('duplicates', 0)
"""


class LogFile:
    """One SQLite file, made at first use. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()

    def close(self) -> None:
        if hasattr(self._local, "db"):
            self._local.db.close()
            del self._local.db

    def connection(self) -> sqlite3.Connection:
        """Return the calling thread's connection.

        ValueError if the file is of another schema, sqlite3.DatabaseError if it is torn, locked or can't be written.
        """
        if not hasattr(self._local, "db"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", "foreign_keys = ON"):
                    db.execute(f"PRAGMA {pragma}")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    _create(db)
                elif version != SCHEMA_VERSION:
                    reads = f"this version of redraft reads {SCHEMA_VERSION} alone: {OTHER_FORMAT}"
                    raise ValueError(f"{self.path} has schema version {version}, and {reads}")
            except sqlite3.DatabaseError as error:
                db.close()
                if error.sqlite_errorcode in TORN:
                    torn = type(error)(f"{self.path} is torn ({error}); bring a backup back: redraft restore FILE")
                    torn.sqlite_errorcode = error.sqlite_errorcode
                    raise torn from error
                raise
            except BaseException:
                db.close()
                raise
            self._local.db = db
        local: sqlite3.Connection = self._local.db
        return local

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with writing(self.connection()) as db:
            yield db

    def append(self, rows: Sequence[QueryRow], dropped: int = 0) -> int:
        """Write rows in one transaction, and return how many were new; one whose id is there is left out and counted.

        `dropped` rows, which were lost before they came here, are added to the persistent count. ValueError or
        sqlite3.Error leaves all unwritten.
        """
        for row in rows:
            require_loggable(row)
        with self.transaction() as db:
            num_new = 0
            for row in rows:
                body = json.dumps(row.model_dump(exclude={"seq"}), ensure_ascii=False, allow_nan=False)
                num_new += db.execute(
                    "INSERT OR IGNORE INTO rows (id, time_ms, subject, domain, consent, body, group_hash, server)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (row.id, row.time_ms, row.subject, row.domain, row.consent, body, row.group, row.server),
                ).rowcount
            count(db, "duplicates", len(rows) - num_new)
            count(db, "dropped", dropped)
        return num_new

    def last_erasure(self) -> int:
        """Return the number of the last erasure, 0 before the first."""
        return int(self.connection().execute("SELECT coalesce(max(number), 0) FROM erasures").fetchone()[0])

    def empty_wal(self) -> bool:
        """Empty the write-ahead log, which may hold older states of a page; False if a reader prevents it."""
        return not self.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep erasures from cleaning up files while rows are turned into files; waits while one does."""
        with lock_file(self._readers(), shared=True):
            yield

    @contextmanager
    def unread(self, wait_s: float) -> Iterator[None]:
        """Wait until nobody turns rows into files, and keep others from it; TimeoutError after `wait_s` seconds."""
        with lock_file(self._readers(), wait_s=wait_s) as is_held:
            if not is_held:
                raise TimeoutError(f"{self.path}: a refresh, an adoption or a post-promotion test is at its rows")
            yield

    def _readers(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f".{self.path.name}.readers")


@contextmanager
def writing(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Begin to write; what the block did holds if it ends, and is undone if it raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk makes SQLite roll back by itself
            db.execute("ROLLBACK")
        raise


def _create(db: sqlite3.Connection) -> None:
    """Make the tables in one transaction; does nothing where another process made them just now."""
    with writing(db):
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def copy_database(file: Path, copy: Path) -> None:
    """Copy a database as it is at this moment, whoever writes to it meanwhile; an older copy is replaced."""
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        replacing(copy) as temporary,
        closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as read,
        closing(sqlite3.connect(temporary)) as db,
    ):
        read.backup(db)


def counter(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])


def count(db: sqlite3.Connection, name: str, amount: int) -> None:
    if amount:
        db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (amount, name))
