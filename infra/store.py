"""The stores that a registry stands on: MLflow's, the rows that say what is to be served, and an object store.

MLflow can't compare and swap. So which version of a kind is served a row in the query log's database decides. It
changes first, by an update that names the version that it replaces, and MLflow's alias is its copy, for people to look
at. `copied` says whether the alias was written since: until then an alias that differs is an older copy, and from then
on somebody moved it by hand.

An object store holds folders of files under `s3://bucket/prefix`, which several machines reach. What a folder is worth
its readers decide; here bytes move. Objects appear whole, each by itself, so that the one that is written last says
that the others are there. Keys, region and endpoint are in the usual variables `AWS_*`.
"""

import logging
import math
import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, insert, select, update

from infra.database import Database, DatabaseUnavailable, OtherSchema
from infra.files import lock_file, replacing
from infra.settings import QUIET_MLFLOW, sqlite_address, sqlite_file
from infra.tables import champions
from models.types import Frozen, Kind

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "redraft"
SCHEME = "s3://"
# A store that does not answer must be noticed in seconds: nobody fetches while it is waited for.
CONNECT_S, READ_S, NUM_TRIES = 3, 5, 2
CHUNK_BYTES = 1 << 24


class StoreUnavailable(ConnectionError):
    """MLflow's store could not be reached, or failed; the same call may succeed later."""


class NotFound(ValueError):
    """The store holds no such thing."""


class Store:
    """One MLflow store, `sqlite:///…` or `http://…`, and our experiment in it. Connects at first use.

    Files of runs lie below `artifact_root`, or in an object store, if there is one.
    """

    def __init__(self, uri: str, artifact_root: Path, object_store: str = "") -> None:
        self.uri, self.artifact_root, self.object_store = uri, artifact_root, object_store
        for name, value in QUIET_MLFLOW.items():  # MLflow reads them when it is imported, at first use
            os.environ.setdefault(name, value)

    def record_run(
        self, name: str, params: Mapping[str, object], metrics: Mapping[str, float], files: Sequence[Path]
    ) -> str:
        """Record a finished run, and return MLflow's id of it; ValueError if a metric is not finite."""
        for metric, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {metric} is {value}, wanted a finite number")
        with translated(f"recording run {name}"):
            from mlflow.entities import Metric, Param

            run_id: str = self.client.create_run(self.experiment_id, run_name=name).info.run_id
            now_ms = int(time.time() * 1000)
            self.client.log_batch(
                run_id,
                metrics=[Metric(metric, value, now_ms, 0) for metric, value in metrics.items()],
                params=[Param(param, str(value)) for param, value in params.items()],
            )
            for file in files:
                self.client.log_artifact(run_id, str(file))
            self.client.set_terminated(run_id)
        return run_id

    def recorded(self, name: str) -> list[dict[str, float]]:
        with translated(f"look up runs named {name}"):
            runs = self.client.search_runs(
                [self.experiment_id], f"attributes.run_name = '{name}'", order_by=["attributes.start_time DESC"]
            )
        return [dict(run.data.metrics) for run in runs]

    def read_text(self, run_id: str, name: str) -> str | None:
        if name not in [file.path for file in self.client.list_artifacts(run_id)]:
            return None
        with tempfile.TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")

    @cached_property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient  # not at the top: it takes two seconds

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        database = sqlite_file(self.uri)
        if database is not None and not database.exists():
            _make_tables(database)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        if database is not None:
            client.search_experiments(max_results=1)  # makes what is missing, and migrates older tables
            with closing(sqlite3.connect(database)) as db:
                db.execute("PRAGMA journal_mode = WAL")  # kept in the file; a write takes 2 ms instead of 20
        return client

    @cached_property
    def experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if (experiment := self.client.get_experiment_by_name(EXPERIMENT)) is not None:
            return str(experiment.experiment_id)
        self.artifact_root.mkdir(parents=True, exist_ok=True)
        location = f"{self.object_store}/mlflow" if self.object_store else self.artifact_root.resolve().as_uri()
        try:
            return self.client.create_experiment(EXPERIMENT, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = self.client.get_experiment_by_name(EXPERIMENT)  # made by another process just now
            assert experiment is not None
            return str(experiment.experiment_id)


def _make_tables(database: Path) -> None:
    """Make the tables of a SQLite file, whole or not at all.

    MLflow makes them by dozens of migrations, none in a transaction. A process killed in one leaves a file in which
    the next begins it again, and fails: so it has another name until it is made.
    """
    utils: Any = import_module("mlflow.store.db.utils")  # without types

    database.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(database.with_name(f".{database.name}.lock")):
        if database.exists():  # made by another process meanwhile
            return
        with replacing(database) as made:
            engine = utils.create_sqlalchemy_engine_with_retry(sqlite_address(made))
            try:
                utils._initialize_tables(engine)
            finally:
                engine.dispose()


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn MLflow's one exception class, and those of its database and ours, into NotFound or StoreUnavailable."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, DatabaseUnavailable, OtherSchema) as error:  # torn, or locked for long
        raise StoreUnavailable(f"{doing}: {str(error).splitlines()[0]}") from error
    except MlflowException as error:
        # An alias that does not exist is an invalid value to MLflow.
        no_alias = error.error_code == "INVALID_PARAMETER_VALUE" and "alias" in str(error)
        if no_alias or error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise NotFound(f"{doing}: {error}") from error
        raise StoreUnavailable(f"{doing}: {error}") from error


class Champion(Frozen):
    """The row of a kind.

    Attributes:
        version: what is to be served, None if there is nothing good.
        previous: the champion that the version replaced, if any, when it was promoted.
        copied: whether MLflow's alias was written for the version.
        changed_ms, changed_by: when the version changed, by the database's clock, and by which process.
    """

    version: int | None
    previous: int | None
    copied: bool
    changed_ms: int
    changed_by: str


class Champions:
    """The rows; every call raises StoreUnavailable where the database is out of reach."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of whoever changes what is served, in any home that has this database."""
        try:
            with self._database.lock("champions"):
                yield
        except DatabaseUnavailable as error:
            raise StoreUnavailable(f"holding the lock of the champions: {error}") from error

    def row(self, kind: Kind) -> Champion | None:
        with translated(f"looking up the champion of {kind}"), self._database.reading() as connection:
            return _row(connection, kind)

    def adopt(self, kind: Kind, version: int | None) -> Champion:
        """Begin the row of a kind with what MLflow's alias names, unless there is one, and return it."""
        with translated(f"beginning the champion of {kind}"), self._database.writing() as connection:
            if (row := _row(connection, kind)) is None:
                row = self._changed(connection, version, None, copied=True)
                connection.execute(insert(champions).values(kind=kind, **row.model_dump()))
            return row

    def replace(self, kind: Kind, expected: int | None, version: int | None, previous: int | None) -> Champion | None:
        """Replace the expected version by another one, and return the row; None where it is no longer there."""
        of_kind, is_expected = champions.c.kind == kind, champions.c.version.is_not_distinct_from(expected)
        with translated(f"changing the champion of {kind}"), self._database.writing() as connection:
            row = self._changed(connection, version, previous, copied=False)
            changed = update(champions).where(of_kind, is_expected).values(row.model_dump())
            return row if connection.execute(changed).rowcount else None

    def note_copied(self, kind: Kind, version: int | None) -> None:
        """Note that the alias was written for the version, if it is still the one to be served."""
        is_same = champions.c.version.is_not_distinct_from(version)
        with translated(f"noting the champion of {kind}"), self._database.writing() as connection:
            connection.execute(update(champions).where(champions.c.kind == kind, is_same).values(copied=True))

    def _changed(self, connection: Connection, version: int | None, previous: int | None, copied: bool) -> Champion:
        return Champion(
            version=version,
            previous=previous,
            copied=copied,
            changed_ms=self._database.now_ms(connection),
            changed_by=f"{socket.gethostname()} {os.getpid()}",
        )


def _row(connection: Connection, kind: Kind) -> Champion | None:
    row = connection.execute(select(champions).where(champions.c.kind == kind)).mappings().one_or_none()
    return None if row is None else Champion.model_validate({name: row[name] for name in Champion.model_fields})


class ObjectsUnavailable(StoreUnavailable):
    """The object store could not be reached, or refused; the same call may succeed later."""


class ObjectMissing(ObjectsUnavailable):
    """The object store answers, and has no such object, or no such bucket."""


class ObjectStore:
    """Connects at first use; every call raises ObjectsUnavailable."""

    @cached_property
    def _files(self) -> Any:
        try:
            from s3fs import S3FileSystem  # an extra, and it takes a second
        except ImportError as error:
            raise ValueError(f"{SCHEME} needs s3fs, which is missing: pip install 'redraft[s3]'") from error

        config = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 0}}
        files = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
        files.retries = NUM_TRIES
        return files

    def upload(self, files: Sequence[tuple[Path, str]], folder: str) -> None:
        """Write files under their names in a folder, in the order given."""
        for path, name in files:
            with _reached(f"writing {folder}/{name}"):
                self._files.put_file(str(path), f"{folder}/{name}")

    def holds(self, address: str) -> bool:
        with _reached(f"looking for {address}"):
            return bool(self._files.exists(address))

    def chunks(self, address: str) -> Iterator[bytes]:
        """Yield the content of one object."""
        with _reached(f"reading {address}"):
            opened = self._files.open(address, "rb", block_size=CHUNK_BYTES, cache_type="readahead")
        with opened:
            while True:
                with _reached(f"reading {address}"):
                    chunk: bytes = opened.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def folders(self, parent: str) -> list[str]:
        """Return the addresses of the folders in a folder, none where it is not there."""
        with _reached(f"listing {parent}"):
            if not self._files.exists(parent):
                return []
            return [f"{SCHEME}{path}" for path in self._files.ls(parent, detail=False)]

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder, and one of its files before all others."""
        with _reached(f"removing {folder}"):
            if self._files.exists(f"{folder}/{first}"):
                self._files.rm_file(f"{folder}/{first}")
            if self._files.exists(folder):
                self._files.rm(folder, recursive=True)


@contextmanager
def _reached(doing: str) -> Iterator[None]:
    """Turn what s3fs and its libraries raise into ObjectsUnavailable."""
    from botocore.exceptions import BotoCoreError  # comes with s3fs

    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"{doing}: it is not there") from error
    except (OSError, BotoCoreError) as error:
        told = (str(error).splitlines() or [""])[0]
        raise ObjectsUnavailable(f"{doing}: {told or type(error).__name__}") from error
