"""Move a home's query log, versions and registry from its own files into the stores that its settings name.

The home's files are read and stay as they are until all has been compared; then they become copies in `backups`. What
was moved is never moved twice, so a move that was stopped goes on. A log that is half moved is refused by whoever else
opens it. Snapshots of rows, keys and Prefect's database stay in the home: they are its machine's.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from sqlalchemy import Connection, Row, Table, Text, collate, delete, func, insert, select, update

from infra import tables
from infra.artifacts import path_of, put
from infra.champions import CHAMPION
from infra.database import MOVING, Database, in_chunks, make_days
from infra.home import COPIES, is_served, served_by
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.settings import Settings, sqlite_file
from infra.store import NotFound, translated
from infra.supervisor import read_state
from infra.trigger_store import TriggerStore
from infra.versions import ADDRESS, ForeignVersion, Version
from models.types import Frozen, Kind

# Tables that grow with traffic; of these what is there already is compared and not written again.
GROWING = (tables.rows, tables.bodies, tables.aliases, tables.sketches, tables.reads)
OTHERS = tuple(one for one in tables.METADATA.sorted_tables if one not in (*GROWING, tables.alembic_version))
COUNTED = select(tables.counters).order_by(tables.counters.c.name)
STREAMED = 500  # rows that are read at a time
# Tag of a directory that other machines need too, to its kind.
SHARED = {"samples_uri": "samples", "state_uri": "state"}
Tell = Callable[[str], None]


class Moved(Frozen):
    """What was moved: rows by table, versions by kind, and where the files are that held them, None if all stay."""

    rows: dict[str, int]
    versions: dict[str, int]
    copies: Path | None


def move_home(settings: Settings, tell: Tell) -> Moved:
    """Move what lies in the home's own files to where `settings` say that it is to be.

    Raises:
        ValueError: nothing is to be moved, somebody has the log open or wrote to it meanwhile, or a store has something
            else already.
        TimeoutError: a refresh runs.
        StoreUnavailable, DatabaseUnavailable: a store can't be reached; run it again.
    """
    own = Settings(home=settings.home, cache=settings.cache)
    assert isinstance(own.querylog, Path)
    log = settings.querylog if isinstance(settings.querylog, str) and own.querylog.is_file() else None
    mlflow = sqlite_file(own.mlflow_uri)
    assert mlflow is not None
    has_registry = mlflow.is_file()
    moves_registry = has_registry and settings.mlflow_uri != own.mlflow_uri
    if not log and not moves_registry and not (has_registry and settings.object_store):
        wanted = "set REDRAFT_QUERYLOG, REDRAFT_ARTIFACTS or REDRAFT_MLFLOW_URI to where it is to be"
        raise ValueError(f"{own.home} has no files that belong elsewhere; {wanted}")
    if moves_registry and not settings.object_store:
        raise ValueError(
            f"versions can't be moved to {settings.mlflow_uri} alone: set REDRAFT_ARTIFACTS to s3://bucket/prefix"
        )
    if is_served(own.home):
        raise ValueError(f"{served_by(own.home)}: stop it first")
    if (up := read_state(own.home)) is not None:
        raise ValueError(f"redraft is up (process {up.pid}); run: redraft down")
    _require_closed(own.querylog)
    held, registry = QueryLog(own.querylog), open_registry(own)
    if has_registry and not registry.versions("draft"):  # it has these names already
        registry = open_registry(own.model_copy(update={"model_prefix": settings.model_prefix}))
    with held.unread(wait_s=0), registry.alone():
        if TriggerStore(own.querylog).state().running:
            raise TimeoutError("a refresh runs; wait for its end, or stop it")
        versions = _move_versions(registry, open_registry(settings), settings, tell) if has_registry else {}
        rows = {} if log is None else _move_log(own.querylog, log, tell)
        held.database.empty_wal()
    held.close()
    left = [file for file, moves in ((own.querylog, log), (mlflow, moves_registry)) if moves]
    return Moved(rows=rows, versions=versions, copies=_put_away(own.home, left) if left else None)


def _require_closed(file: Path) -> None:
    """Raise ValueError if another process has a file open: what it wrote later would be in no store."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended, or is another user's
            if descriptor.readlink() == file.resolve() and (pid := int(descriptor.parts[2])) != os.getpid():
                raise ValueError(f"process {pid} has {file} open: stop it first")


def _put_away(home: Path, files: Iterable[Path]) -> Path:
    """Move databases, each with its write-ahead log, into a new folder of copies."""
    copies = home / COPIES / f"moved-{int(time.time() * 1000)}"
    copies.mkdir(mode=0o700, parents=True)
    for file in files:
        for part in sorted(file.parent.glob(f"{file.name}*")):
            part.rename(copies / part.name)
    return copies


def _move_log(file: Path, address: str, tell: Tell) -> dict[str, int]:
    source, into = Database(file), Database(address, moves_in=True)
    moved = {}
    with source.reading() as read, _closed_to_others(into) as is_whole:
        if not is_whole:
            _copy(read, into, tell)
        for table in (*GROWING, *OTHERS):
            tell(f"comparing {table.name}")
            moved[table.name] = _compare(read, into, table)
        with source.writing() as later:  # what was read is of the moment at which the move began
            if later.execute(COUNTED).all() != read.execute(COUNTED).all():
                raise ValueError(f"{source}: rows came while it was moved; run it again")
        _require_closed(file)
    source.close()
    return moved


@contextmanager
def _closed_to_others(into: Database) -> Iterator[bool]:
    """Keep all others from a database until such a block ended without an error, in this process or a later one.

    Yields whether a whole log is in it already: then it stays open.
    """
    version = tables.alembic_version.c.version_num
    with into.writing() as write:
        is_begun = write.execute(select(version)).scalar_one() == str(MOVING)
        used = any(write.execute(select(one).limit(1)).first() for one in (tables.rows, tables.champions))
        if not used:
            write.execute(update(tables.alembic_version).values(version_num=str(MOVING)))
    yield used and not is_begun
    with into.writing() as write:
        write.execute(update(tables.alembic_version).values(version_num=str(tables.SCHEMA_VERSION)))


def _copy(read: Connection, into: Database, tell: Tell) -> None:
    for table in GROWING:
        _move_growing(read, into, table, tell)
    with into.writing() as write:
        for table in reversed(OTHERS):
            write.execute(delete(table))
        for table in OTHERS:
            with _rows(read, table) as rows:
                if found := [row._asdict() for row in rows]:
                    write.execute(insert(table), found)


def _move_growing(read: Connection, into: Database, table: Table, tell: Tell) -> None:
    """Append what a table lacks of another."""
    with into.reading() as there:
        done = int(there.execute(select(func.count()).select_from(table)).scalar_one())
    with _rows(read, table, done) as found:
        for rows in in_chunks(found):
            with into.writing() as write:
                if table is tables.bodies:
                    make_days(write, (row.time_ms for row in rows))
                write.execute(insert(table), [row._asdict() for row in rows])
            done += len(rows)
            tell(f"{table.name}: {done:,} rows")


def _compare(read: Connection, into: Database, table: Table) -> int:
    """Return how many rows two tables have; ValueError if one has another, or one that the other lacks."""
    num = 0
    with into.reading() as there, _rows(read, table) as rows, _rows(there, table) as moved_rows:
        for row, moved in zip_longest(rows, moved_rows):
            if row is None or moved is None or tuple(row) != tuple(moved):
                at = row if moved is None else moved
                key = ", ".join(f"{one.name} {getattr(at, one.name)!r}" for one in table.primary_key)
                fault = f"{table.name} with {key} is not as in the home's file"
                raise ValueError(f"{into}: {fault}; name another schema, or drop this one and run it again")
            num += 1
    return num


@contextmanager
def _rows(connection: Connection, table: Table, start: int = 0) -> Iterator[Iterable[Row[Any]]]:
    """Yield the rows from the one of a number on, in an order that is the same on all databases."""
    is_postgres = connection.dialect.name != "sqlite"
    order = [collate(one, "C") if is_postgres and isinstance(one.type, Text) else one for one in table.primary_key]
    found = select(table).order_by(*order).offset(start)
    with connection.execute(found, execution_options={"yield_per": STREAMED}) as rows:
        yield rows


def _move_versions(own: Registry, into: Registry, settings: Settings, tell: Tell) -> dict[str, int]:
    moved = {}
    for kind in get_args(Kind):
        versions = own.versions(kind)[::-1]
        is_same = (own.store.uri, own.model(kind)) == (into.store.uri, into.model(kind))
        for version in versions:
            tell(f"{kind} {version.number}")
            address, tags = _move_files(own, version, settings)
            if not is_same:
                _register_again(own, into, version, address, tags)
                continue
            for name, value in tags.items():
                into.tag(version, name, value)
            if address.startswith("s3:") and address != version.address:
                with translated(f"naming where {kind} {version.number} lies"):
                    into.store.client.set_model_version_tag(into.model(kind), str(version.number), ADDRESS, address)
        if not is_same and (champion := own.champion(kind)) is not None:
            with translated(f"naming the champion of {kind}"):
                into.store.client.set_registered_model_alias(into.model(kind), CHAMPION, str(champion.number))
        moved[kind] = len(versions)
    return moved


def _move_files(own: Registry, version: Version, settings: Settings) -> tuple[str, dict[str, str]]:
    """Return where a version's files lie from now on, and which tags of its directories change."""
    root, tags = settings.object_store, {}
    for tag, kind in SHARED.items():
        uri = version.tags.get(tag, "")
        if root and uri.startswith("file:") and path_of(uri).is_dir():
            tags[tag] = put(path_of(uri), kind, root)
    if not root or version.cleaned or version.address.startswith("s3:"):
        return version.address or version.source, tags
    return put(own.download(version, settings.cache), version.kind, root), tags


def _register_again(own: Registry, into: Registry, version: Version, address: str, tags: Mapping[str, str]) -> None:
    """Make a version in another MLflow, under the same number; ValueError if it has another one there."""
    kind, number = version.kind, version.number
    try:
        if (there := into.get(kind, number)).sha256 != version.sha256:
            raise ValueError(
                f"{into.store.uri} has another {kind} {number} already: digest {there.sha256}, not {version.sha256}"
            )
        return
    except NotFound:
        _create(own, into, version, address)
    except ForeignVersion:  # its tags were not all written before the move was stopped
        pass
    written = {name: value for name, value in {**version.tags, **tags}.items() if name not in ("model_id", ADDRESS)}
    with translated(f"tagging {kind} {number}"):
        for name in sorted(written, key="sha256".__eq__):  # which comes last: without it nobody takes it for a version
            into.store.client.set_model_version_tag(into.model(kind), str(number), name, written[name])


def _create(own: Registry, into: Registry, version: Version, address: str) -> None:
    kind, number, client = version.kind, version.number, into.store.client
    name = into.model(kind)
    into.store.require_model(into.model(kind))
    with translated(f"moving {kind} {number}"), tempfile.TemporaryDirectory() as folder:
        old = own.store.client.get_model_version(own.model(kind), str(number))
        run = own.store.client.get_run(str(old.run_id))
        listed = own.store.client.list_artifacts(run.info.run_id)
        files = [Path(own.store.client.download_artifacts(run.info.run_id, one.path, folder)) for one in listed]
        run_id = into.store.record_run(run.info.run_name or "", run.data.params, run.data.metrics, files)
        told = (old.description or "").replace(run.info.run_id, run_id)
        told = told.replace(f"#/experiments/{own.store.experiment_id}/", f"#/experiments/{into.store.experiment_id}/")
        while True:  # MLflow numbers them; what was deleted here leaves its number free there, too
            made = int(client.create_model_version(name, source=address, run_id=run_id, description=told).version)
            if made == number:
                return
            client.delete_model_version(name, str(made))
            if made > number:
                raise ValueError(f"{into.store.uri} had a {kind} {made - 1} already, so none becomes {number} there")
