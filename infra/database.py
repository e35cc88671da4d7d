"""The database of a home's query log: a SQLite file in WAL mode, or a schema of a Postgres that many hosts share.

`infra.tables` has its tables; statements are SQLAlchemy Core and the same on both. One transaction writes at a time:
on SQLite it holds the file's lock, on Postgres an advisory one, until it has committed. So what it numbers (`seq` of
rows) is in the order of commits, and no row in flight comes to stand behind a cursor.

SQLite writes with full durability and overwrites erased text in its file (secure_delete); Postgres commits as its
server is set to.

A lease is what a process holds for as long as it lives. A holder that is gone is seen at once where process ids can
tell. They can't for another host or container, nor for a process that stands still: there the lease decides. It runs on
the database's clock, and a thread renews it.
"""

import hashlib
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, QueuePool, Row, create_engine, event, insert, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, InternalError, OperationalError

from infra.files import LOCK_POLL_S, lock_file, replacing
from infra.home import OTHER_FORMAT
from infra.machine import process_identity, process_place
from infra.tables import COUNTERS, METADATA, SCHEMA_VERSION, alembic_version, counters

BUSY_TIMEOUT_S, CONNECT_TIMEOUT_S = 5.0, 5
STUCK_S = 30  # after which Postgres ends a transaction that writes, and whose process stands still
MOVING = -1  # instead of a schema's version: a home is being moved in (infra/move_home.py)
FIRST_VERSION = 8  # older ones were of no release, and are not brought up to date
MIGRATIONS = Path(__file__).parent / "migrations"
TORN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
POSTGRES = ("postgres", "postgresql", "postgresql+psycopg")
SCHEMA_NAME = r"[a-z_][a-z0-9_]{0,62}"
POOL: dict[str, Any] = {"pool_size": 1, "max_overflow": -1}  # threads that work at the same time have one each
STREAMED = 500  # rows that are read at a time where their text is read
DAY, DAY_MS = "bodies_", 24 * 3600 * 1000  # begins the name of a day's partition
CHUNK = 5000  # parameters of a statement; SQLite takes 32,766
NOT_ALLOWED = "42501"  # Postgres's code for a role without the right
BEGIN = "sqlite_begin"  # option of a connection: the statement that begins a transaction on SQLite
NOW_MS = {
    "sqlite": text("SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"),
    "postgresql": text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"),
}
IS_TABLE = text("SELECT count(*) FROM pg_tables WHERE schemaname = :schema AND tablename = :name")
HAS_LZ4 = text("""SELECT count(*) FROM pg_settings
    WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals)""")
DAYS = text("""SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'
    AND relnamespace = to_regnamespace(current_schema())""")
EXCLUDE_WRITERS = text("""SELECT set_config('idle_in_transaction_session_timeout', :stuck, true),
    set_config('lock_timeout', :busy, true), pg_advisory_xact_lock(:schema, :name)""")
T = TypeVar("T")
LEASE_S, RENEWALS_PER_LEASE = 600.0, 10


class DatabaseUnavailable(ConnectionError):
    """It is down, busy, full, read-only or torn; of these all but the last may pass."""


class DatabaseTorn(DatabaseUnavailable):
    """The file is no database any more."""


class OtherSchema(ValueError):
    """Its tables are of another version than this one reads."""


class Database:
    """One database, made at first use. Safe to use from several threads, processes and, on Postgres, hosts."""

    def __init__(self, address: Path | str, moves_in: bool = False) -> None:
        """Take a file, or `postgresql://user@host/database?schema=NAME`; ValueError if it is neither."""
        self._moves_in = moves_in
        self.file = address if isinstance(address, Path) else None
        self._engine, self.schema = (_sqlite(address), "") if isinstance(address, Path) else _postgres(address)
        self._name = str(address) if isinstance(address, Path) else self._engine.url.render_as_string()
        weakref.finalize(self, self._engine.dispose)

    def __str__(self) -> str:
        return f"{self._name} (schema {self.schema})" if self.schema else self._name

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may use it, of whose processes nothing can be seen."""
        return self.file is None

    def close(self) -> None:
        """Close the connections that nobody uses; the next use opens new ones."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read what is committed at one moment.

        OtherSchema if the tables are of another version, DatabaseUnavailable if it can't be read.
        """
        options: dict[str, Any] = {} if self.file else {"isolation_level": "REPEATABLE READ"}
        with self._connected(**options) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Write as the only one; what the block did holds if it ends, and is undone if it raises.

        DatabaseUnavailable if others write for longer than `BUSY_TIMEOUT_S`; otherwise as `reading`.
        """
        with self._connected("BEGIN IMMEDIATE") as connection, connection.begin():
            self._exclude_writers(connection)
            yield connection

    @contextmanager
    def autocommitting(self) -> Iterator[Connection]:
        """Let each statement stand alone: what can't be done inside a transaction, such as VACUUM."""
        with self._connected("", **({} if self.file else {"isolation_level": "AUTOCOMMIT"})) as connection:
            yield connection

    @contextmanager
    def lock(self, name: str, shared: bool = False, wait_s: float | None = None) -> Iterator[bool]:
        """Hold a lock of this database by name, as `lock_file` does; it ends with its process or its connection.

        DatabaseUnavailable at the end of the block if the connection was lost in between, and the lock with it.
        """
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with lock_file(self.file.with_name(f".{self.file.name}.{name}"), shared, wait_s) as held:
                yield held
            return
        take = text(f"SELECT pg_try_advisory_lock{'_shared' if shared else ''}(:schema, :name)")
        until_s = None if wait_s is None else time.monotonic() + wait_s
        with self.autocommitting() as connection:
            connection.detach()  # closed at the end and never used again, which ends the lock
            while not (held := connection.execute(take, self._key(name)).scalar_one()):
                if until_s is not None and time.monotonic() >= until_s:
                    break
                time.sleep(LOCK_POLL_S)
            yield held
            connection.execute(text("SELECT 1"))

    def now_ms(self, connection: Connection) -> int:
        """Return the time by the database's clock, which is the same for all hosts."""
        return int(connection.execute(NOW_MS[connection.dialect.name]).scalar_one())

    def num_bytes(self, connection: Connection) -> int:
        if self.file is not None:
            files = (self.file, self.file.with_name(self.file.name + "-wal"))
            return sum(file.stat().st_size for file in files if file.exists())
        tables = text("""SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class
            WHERE relnamespace = to_regnamespace(current_schema()) AND relkind = 'r'""")
        return int(connection.execute(tables).scalar_one())

    def empty_wal(self) -> bool:
        """Empty SQLite's write-ahead log, which may hold older states of a page; False if a reader prevents it."""
        if self.file is None:
            return True
        with self.autocommitting() as connection:
            return not connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)")).scalar_one()

    def vacuum(self, days: Iterable[int] = ()) -> None:
        """Write anew what deleted rows left free: SQLite's file, or on Postgres the bodies of some days."""
        with self.autocommitting() as connection:
            if self.file is not None:
                connection.execute(text("VACUUM"))
                return
            for day in days:
                connection.execute(text(f'VACUUM (FULL) "{DAY}{day}"'))
            connection.execute(text("VACUUM rows, aliases, sketches, attempts"))

    def _exclude_writers(self, connection: Connection) -> None:
        if self.file is None:
            limits = {"stuck": f"{STUCK_S}s", "busy": f"{BUSY_TIMEOUT_S}s"}
            connection.execute(EXCLUDE_WRITERS, limits | self._key("writer"))

    def _key(self, name: str) -> dict[str, int]:
        digests = (hashlib.sha256(one.encode()).digest() for one in (f"redraft {self.schema}", name))
        schema, lock = (int.from_bytes(digest[:4], "big", signed=True) for digest in digests)
        return {"schema": schema, "name": lock}

    @contextmanager
    def _connected(self, begin: str = "BEGIN", **options: Any) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                if not connection.info.get("is_current"):  # of the connection below, for as long as it lives
                    self._bring_up_to_date(connection)
                    connection.info["is_current"] = True
                yield connection.execution_options(**{BEGIN: begin}, **options)
        except (DataError, OverflowError) as error:
            raise ValueError(f"{self} can't hold a value: {_cause(error)}") from error
        except DBAPIError as error:
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in TORN:
                self.close()  # another file may come in its place
                raise DatabaseTorn(
                    f"{self} is torn ({_cause(error)}); bring a backup back: redraft restore FILE"
                ) from error
            passing = isinstance(error, OperationalError | InternalError | InterfaceError)
            if passing or getattr(error.orig, "sqlstate", "") == NOT_ALLOWED:
                raise DatabaseUnavailable(f"{self}: {_cause(error)}") from error
            raise

    def _bring_up_to_date(self, connection: Connection) -> None:
        """Make the tables, or migrate older ones, in one transaction; OtherSchema if this version can't read them."""
        version = self._version(connection)
        connection.rollback()
        if version == SCHEMA_VERSION or (version == MOVING and self._moves_in):
            return
        if version == MOVING:
            raise OtherSchema(f"{self} holds a part of a home that is being moved; complete it: redraft move-home")
        if version > SCHEMA_VERSION or 0 < version < FIRST_VERSION:
            reads = f"this version of redraft reads {SCHEMA_VERSION} alone: {OTHER_FORMAT}"
            raise OtherSchema(f"{self} has schema version {version}, and {reads}")
        with connection.execution_options(**{BEGIN: "BEGIN IMMEDIATE"}).begin():
            self._exclude_writers(connection)
            version = self._version(connection)  # another process may have done it just now
            if version == 0:
                self._create(connection)
            elif version < SCHEMA_VERSION:
                _migrate(connection)
            if self.file is not None:  # for versions that don't know alembic
                connection.execute(text(f"PRAGMA user_version = {SCHEMA_VERSION}"))

    def _version(self, connection: Connection) -> int:
        """Return the number of the schema, 0 before there is one."""
        if self.file is not None:
            return int(connection.execute(text("PRAGMA user_version")).scalar_one())
        # Of names that another process gave just now, Postgres's functions may not know yet; its catalogue does.
        if not connection.execute(IS_TABLE, {"schema": self.schema, "name": "alembic_version"}).scalar_one():
            return 0
        return int(connection.execute(select(alembic_version.c.version_num)).scalar_one())

    def _create(self, connection: Connection) -> None:
        is_there = text("SELECT count(*) FROM pg_namespace WHERE nspname = :schema")
        if self.file is None and not connection.execute(is_there, {"schema": self.schema}).scalar_one():
            connection.execute(text(f'CREATE SCHEMA "{self.schema}"'))
        METADATA.create_all(connection, checkfirst=False)
        if self.file is None and connection.execute(HAS_LZ4).scalar_one():  # half of what a row costs the server
            connection.execute(text("ALTER TABLE bodies ALTER COLUMN body SET COMPRESSION lz4"))
        connection.execute(insert(alembic_version).values(version_num=str(SCHEMA_VERSION)))
        connection.execute(insert(counters), [{"name": name, "value": 0} for name in COUNTERS])


def in_chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists that one statement can name as its parameters."""
    left = iter(values)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def make_days(connection: Connection, times_ms: Iterable[int]) -> None:
    """Make the partitions of `bodies` that some times fall into, where there are none; SQLite's table has none."""
    if connection.dialect.name == "sqlite":
        return
    there = {*days(connection)}
    for day in sorted({time_ms // DAY_MS for time_ms in times_ms} - there):
        # Attached and not made inside, which would wait for everyone who reads another day.
        connection.execute(text(f'CREATE TABLE "{DAY}{day}" (LIKE bodies INCLUDING ALL)'))
        span = f"FROM ({day * DAY_MS}) TO ({(day + 1) * DAY_MS})"
        connection.execute(text(f'ALTER TABLE bodies ATTACH PARTITION "{DAY}{day}" FOR VALUES {span}'))


def days(connection: Connection) -> list[int]:
    """Return the days, since 1970, that have a partition of `bodies`."""
    return sorted(int(name.removeprefix(DAY)) for name in connection.scalars(DAYS))


def drop_day(connection: Connection, day: int) -> None:
    connection.execute(text(f'DROP TABLE "{DAY}{day}"'))


def copy_database(file: Path, copy: Path) -> None:
    """Copy a SQLite file as it is at this moment, whoever writes to it meanwhile; an older copy is replaced."""
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        replacing(copy) as temporary,
        closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as read,
        closing(sqlite3.connect(temporary)) as db,
    ):
        read.backup(db)


def _sqlite(file: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        file.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", "foreign_keys = ON"):
                db.execute(f"PRAGMA {pragma}")
        except BaseException:
            db.close()
            raise
        return db

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, hide_parameters=True, **POOL)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if statement := connection.get_execution_options().get(BEGIN, "BEGIN"):
            connection.exec_driver_sql(statement)

    return engine


def _postgres(address: str) -> tuple[Engine, str]:
    """Return an engine, and the schema that its tables are in."""
    try:
        url = make_url(address)
    except ArgumentError:
        url = None
    schema = "" if url is None else str(url.query.get("schema", ""))
    if url is None or url.drivername not in POSTGRES or re.fullmatch(SCHEMA_NAME, schema) is None:
        came = "an address of another form" if url is None else url.render_as_string()
        raise ValueError(f"got {came}, wanted a file or postgresql://user@host/database?schema=NAME, of a-z, 0-9 and _")
    url = url.set(drivername="postgresql+psycopg").difference_update_query(["schema"])
    own = f"{url.query.get('options', '')} -csearch_path={schema}".strip()
    settings = {"options": own, "connect_timeout": CONNECT_TIMEOUT_S, "application_name": "redraft"}
    try:
        engine = create_engine(url, connect_args=settings, hide_parameters=True, pool_pre_ping=True, **POOL)
    except ModuleNotFoundError as error:
        raise ValueError("a query log on Postgres needs psycopg; run: pip install 'redraft[postgres]'") from error
    return engine, schema


def _migrate(connection: Connection) -> None:
    # At the top they would take every process three seconds, and few ever migrate.
    from alembic.migration import MigrationContext
    from alembic.operations import Operations
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    steps = {"fn": lambda revision, _: scripts._upgrade_revs(str(SCHEMA_VERSION), revision)}
    context = MigrationContext.configure(connection, opts=steps)
    with Operations.context(context):
        context.run_migrations()


def _cause(error: Exception) -> str:
    """Return the first line of what a driver says: those behind it may quote a row."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]


def lease(database: Database, connection: Connection, lease_s: float = LEASE_S) -> dict[str, Any]:
    """Return the columns of a lease of this process that begins now."""
    pid, until_ms = os.getpid(), database.now_ms(connection) + int(lease_s * 1000)
    return {"pid": pid, "process": process_identity(pid), "lease_until_ms": until_ms}


def is_held(database: Database, connection: Connection, held: Row[Any]) -> bool:
    """Return whether the process of a lease's columns may still run."""
    if database.now_ms(connection) >= held.lease_until_ms:
        return False
    process: str = held.process
    boot, namespace, _ = process.split(" ")
    own_boot, own_namespace = process_place().split(" ")
    if (boot, namespace) != (own_boot, own_namespace):
        return boot == own_boot or database.is_shared  # else this machine was started again since
    return process_identity(held.pid) == process


@contextmanager
def renewing(renew: Callable[[], bool], lease_s: float = LEASE_S) -> Iterator[None]:
    """Call `renew` from a thread in time, for as long as the context lasts or until it says that the lease is lost."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(lease_s / RENEWALS_PER_LEASE):
            # Busy, full or restarting: the next one comes before the lease ends.
            with suppress(DatabaseUnavailable):
                if not renew():
                    return

    thread = threading.Thread(target=run, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
