"""Prefect's history in the home's own database, by the day on which things ended: runs, tasks, states, logs, events.

Prefect keeps runs for ever. The tables are its own, so they are read and written by the few names below, also while its
server runs. What has not ended is never touched.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

BUSY_TIMEOUT_S = 30.0
# The runs that ended, and those of a day.
_VIEWS = """
CREATE TEMP VIEW ended AS
    SELECT id, date(end_time) AS day FROM flow_run WHERE state_type IN ('COMPLETED', 'FAILED', 'CANCELLED', 'CRASHED');
CREATE TEMP TABLE runs (id TEXT PRIMARY KEY);
"""
_DAYS = """
SELECT day FROM ended UNION SELECT date(occurred) FROM events UNION
SELECT date(timestamp) FROM log WHERE coalesce(flow_run_id, '') NOT IN (SELECT id FROM flow_run) ORDER BY 1
"""
# What goes with a day, in an order in which it may.
_OF_DAY = (
    "FROM task_run_state WHERE task_run_id IN (SELECT id FROM task_run WHERE flow_run_id IN (SELECT id FROM runs))",
    "FROM task_run WHERE flow_run_id IN (SELECT id FROM runs)",
    "FROM flow_run_state WHERE flow_run_id IN (SELECT id FROM runs)",
    "FROM artifact WHERE flow_run_id IN (SELECT id FROM runs)",
    "FROM log WHERE flow_run_id IN (SELECT id FROM runs)",
    "FROM log WHERE date(timestamp) = :day AND coalesce(flow_run_id, '') NOT IN (SELECT id FROM flow_run)",
    "FROM event_resources WHERE date(occurred) = :day",
    "FROM events WHERE date(occurred) = :day",
    "FROM flow_run WHERE id IN (SELECT id FROM runs)",
)


class Day(NamedTuple):
    """What ended on a day, such as "2026-11-24", and how many bytes its values have."""

    day: str
    num_bytes: int


def database(home: Path) -> Path:
    return home / "prefect" / "prefect.db"


def days(file: Path) -> list[Day]:
    """Return the days of a history, oldest first; none without file or tables; sqlite3.Error if it is torn."""
    if not file.is_file():
        return []
    with closing(_connect(file)) as db:
        if not db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'event_resources'").fetchone()[0]:
            return []
        db.executescript(_VIEWS)
        return [Day(day, _num_bytes(db, day)) for (day,) in db.execute(_DAYS).fetchall() if day is not None]


def forget(file: Path, day: str) -> None:
    """Remove what ended on a day, at once or not at all."""
    with closing(_connect(file)) as db:
        db.executescript(_VIEWS)
        db.execute("BEGIN IMMEDIATE")
        _choose(db, day)
        for part in _OF_DAY:
            db.execute(f"DELETE {part}", {"day": day})
        db.execute("DELETE FROM artifact_collection WHERE latest_id NOT IN (SELECT id FROM artifact)")
        db.execute("COMMIT")


def compact(file: Path) -> None:
    with closing(_connect(file)) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _connect(file: Path) -> sqlite3.Connection:
    db = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _choose(db: sqlite3.Connection, day: str) -> None:
    db.execute("DELETE FROM runs")
    db.execute("INSERT INTO runs SELECT id FROM ended WHERE day = ?", (day,))


def _num_bytes(db: sqlite3.Connection, day: str) -> int:
    _choose(db, day)
    found = (row for part in _OF_DAY for row in db.execute(f"SELECT * {part}", {"day": day}))
    return sum(len(value) if isinstance(value, str | bytes) else 8 for row in found for value in row)
