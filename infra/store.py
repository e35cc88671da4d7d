"""The stores that a registry stands on: MLflow's, and an object store.

An object store holds folders of files under `s3://bucket/prefix`, which several machines reach. What a folder is worth
its readers decide; here bytes move. Objects appear whole, each by itself, so that the one that is written last says
that the others are there. Keys, region and endpoint are in the usual variables `AWS_*`.
"""

import logging
import math
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.database import DatabaseUnavailable, OtherSchema
from infra.files import lock_file, replacing
from infra.settings import QUIET_MLFLOW, sqlite_address, sqlite_file
from models.types import MANIFEST_NAME

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

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

    def require_model(self, name: str) -> None:
        """Make a model of the registry, unless it is there."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def version(self, name: str, number: int) -> "ModelVersion":
        """Return a version of a model; NotFound if there is no such number."""
        try:
            with translated(f"looking up {name} {number}"):
                return self.client.get_model_version(name, str(number))
        except NotFound as error:
            raise NotFound(f"the registry has no {name} {number}") from error

    def log_model(self, name: str, directory: Path, run_id: str) -> "LoggedModel":
        """Copy a directory into MLflow as a model that a run made."""
        model = self.client.create_logged_model(self.experiment_id, name=name, source_run_id=run_id)
        self.client.log_model_artifacts(model.model_id, str(directory))
        return self.client.finalize_logged_model(model.model_id, "READY")

    def fetch_model(self, name: str, number: int, staging: Path) -> None:
        """Copy what MLflow holds of a version into an empty directory."""
        from mlflow.artifacts import download_artifacts

        (inner := staging / ".fetched").mkdir()
        uri = self.client.get_model_version_download_uri(name, str(number))
        # Into a folder of MLflow's choosing below ours; without dst_path it may hand out the store's files.
        downloaded = download_artifacts(artifact_uri=uri, dst_path=str(inner), tracking_uri=self.uri)
        for path in Path(downloaded).iterdir():
            path.rename(staging / path.name)
        shutil.rmtree(inner)
        (staging / MANIFEST_NAME).touch()  # younger than what it lists, whatever came last

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
    from mlflow.store.db import utils as untyped

    utils: Any = untyped
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
