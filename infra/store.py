"""The MLflow store that everything of an installation is written to: its connection, its errors, and finished runs."""

import logging
import math
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from infra.database import DatabaseUnavailable, OtherSchema
from infra.settings import QUIET_MLFLOW, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "redraft"


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
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        if database is not None:
            client.search_experiments(max_results=1)  # makes the tables
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
