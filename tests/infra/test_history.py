"""Prefect's history goes by the day on which runs ended, out of Prefect's own tables."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from infra.history import Day, compact, days, forget

OLD, RECENT = "2026-01-02", "2026-03-04"
TABLES = ("flow_run", "flow_run_state", "task_run", "task_run_state", "log", "artifact", "events", "event_resources")


def fill(db: sqlite3.Connection, table: str, **values: object) -> None:
    """Add a row; columns that must have a value and are not given hold a number or a text."""
    for _, name, kind, needed, default, _ in db.execute(f"PRAGMA table_info({table})").fetchall():
        if needed and default is None and name not in values:
            values[name] = 0 if kind.split("(")[0] in ("INTEGER", "FLOAT", "BOOLEAN") else f"{name} of {table}"
    names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", (*values.values(),))


def add_run(db: sqlite3.Connection, run: str, day: str, state: str = "COMPLETED") -> None:
    """Add a run with a task, their states, a log line of 5,000 characters, an artifact and an event."""
    at = f"{day} 10:00:00.000000"
    fill(db, "flow_run", id=run, flow_id="flow", state_type=state, end_time=None if state == "RUNNING" else at)
    fill(db, "flow_run_state", id=f"state of {run}", flow_run_id=run, type=state)
    fill(db, "task_run", id=f"task of {run}", flow_run_id=run)
    fill(db, "task_run_state", id=f"state of task of {run}", task_run_id=f"task of {run}", type=state)
    fill(db, "log", id=f"log of {run}", flow_run_id=run, timestamp=f"{OLD} 09:00:00.000000", message="m" * 5000)
    fill(db, "artifact", id=f"artifact of {run}", flow_run_id=run, key=run)
    fill(db, "artifact_collection", id=f"latest of {run}", key=run, latest_id=f"artifact of {run}")
    fill(db, "events", id=f"event of {run}", occurred=at)
    fill(db, "event_resources", id=f"resource of {run}", event_id=f"event of {run}", occurred=at)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of the installed Prefect, without a row."""
    from prefect.server.database.orm_models import Base
    from sqlalchemy import create_mock_engine
    from sqlalchemy.schema import CreateTable

    file = tmp_path_factory.mktemp("prefect") / "prefect.db"
    dialect = create_mock_engine("sqlite://", lambda *_: None).dialect
    with closing(sqlite3.connect(file)) as db:  # without the indexes, which Prefect's migrations name otherwise
        for table in Base.metadata.sorted_tables:
            db.execute(str(CreateTable(table).compile(dialect=dialect)))
    return file


@pytest.fixture
def file(empty: Path, tmp_path: Path) -> Path:
    """Two runs that ended, on two days, and one that runs."""
    copy = tmp_path / "prefect.db"
    copy.write_bytes(empty.read_bytes())
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        fill(db, "flow", id="flow", name="refresh")
        add_run(db, "first", OLD)
        add_run(db, "second", RECENT, "FAILED")
        add_run(db, "third", RECENT, "RUNNING")
        fill(db, "log", id="log of nobody", flow_run_id=None, timestamp=f"{OLD} 09:00:00.000000")
    return copy


def left(file: Path) -> dict[str, int]:
    with closing(sqlite3.connect(file)) as db:
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}


def test_a_day_takes_its_runs_along_with_all_of_theirs_and_nothing_of_what_still_runs(file: Path) -> None:
    first, second = days(file)
    assert (first.day, second.day) == (OLD, RECENT)
    assert all(5000 < found.num_bytes < 8000 for found in (first, second))  # no second log line of 5,000 characters
    server = sqlite3.connect(file)  # as Prefect's, which has it open
    server.execute("SELECT * FROM flow_run").fetchone()
    size = file.stat().st_size
    forget(file, OLD)
    compact(file)
    server.close()
    assert file.stat().st_size < size
    assert [found.day for found in days(file)] == [RECENT]
    assert left(file) == dict.fromkeys(TABLES, 2)
    forget(file, RECENT)
    assert days(file) == []
    assert left(file) == dict.fromkeys(TABLES, 1) | {"events": 0, "event_resources": 0}
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        assert db.execute("SELECT id, state_type FROM flow_run").fetchall() == [("third", "RUNNING")]
        assert db.execute("SELECT key FROM artifact_collection").fetchall() == [("third",)]


def test_where_prefect_kept_nothing_there_is_no_history(tmp_path: Path) -> None:
    assert days(tmp_path / "prefect.db") == []
    sqlite3.connect(tmp_path / "prefect.db").close()
    assert days(tmp_path / "prefect.db") == list[Day]()
