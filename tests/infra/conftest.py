"""Where tests of the query log keep it: a SQLite file, or a schema of its own on a Postgres server."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tests.conftest import TEST_POSTGRES
from tests.postgres import PostgresServer, find_binaries

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
