"""Where tests of the query log keep it, a SQLite file or a schema of its own on a Postgres server, and what they keep.

A module with a `registry` or a `place` of its own gets `promote` and `log` of that one.
"""

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from infra.artifacts import staged
from infra.database import Database
from infra.querylog import QueryLog
from infra.registry import Registry
from tests.conftest import TEST_POSTGRES
from tests.postgres import PostgresServer, find_binaries
from tests.tags import draft_tags

Make = Callable[[str], Path]
STORES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server of the session's own."""
    if find_binaries() is None:
        pytest.skip("there is no Postgres here: install Debian's postgresql")
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> str:
    """The address of a database: of the session's server, unless REDRAFT_TEST_POSTGRES names another."""
    return TEST_POSTGRES or str(request.getfixturevalue("postgres_server").address)


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Where a log can be made: a file in a folder that is not there yet, or the address of a new schema."""
    if request.param == "sqlite":
        yield tmp_path / "below" / "queries.db"
        return
    yield from new_schema(request.getfixturevalue("postgres"))


def new_schema(address: str) -> Iterator[str]:
    schema = f"test_{uuid.uuid4().hex[:12]}"
    yield f"{address}{'&' if '?' in address else '?'}schema={schema}"
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def log(place: Path | str) -> Iterator[QueryLog]:
    log = QueryLog(place)
    yield log
    log.close()


def made(folder: Path, content: str) -> Path:
    """Make a directory of weights, and of a file below it, with a manifest."""
    with staged(folder / "checkpoints" / content) as directory:
        (directory / "model.safetensors").write_text(content)
        (directory / "nested").mkdir()
        (directory / "nested" / "config.json").write_text("{}")
    return folder / "checkpoints" / content


@pytest.fixture
def checkpoint(tmp_path: Path) -> Make:
    return partial(made, tmp_path)


@pytest.fixture
def promote(registry: Registry) -> Callable[..., None]:
    """What makes drafts the champion, one after the other."""

    def made(*numbers: int) -> None:
        for number in numbers:
            registry.promote("draft", number)

    return made


@pytest.fixture(scope="session")
def stocked(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a registry of a target and three drafts, none of which serves; files lie below `artifacts`."""
    folder = tmp_path_factory.mktemp("stocked")
    (folder / "mlflow.db").write_bytes(store.read_bytes())
    registry = Registry(f"sqlite:///{folder}/mlflow.db", folder / "artifacts", Database(folder / "queries.db"))
    for name in ("target 1", "draft 1", "draft 2", "draft 3"):
        registry.register("target" if name == "target 1" else "draft", made(folder, name), draft_tags())
    with closing(sqlite3.connect(folder / "mlflow.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder / "mlflow.db"


def champion_number(registry: Registry) -> int | None:
    champion = registry.champion("draft")
    return None if champion is None else champion.number
