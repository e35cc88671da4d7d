"""Refreshes on top of a tiny build, by the command. Drills kill them (tests/drills/test_pipeline.py)."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from infra.querylog import QueryLog
from tests.flows.conftest import registry_of

pytestmark = pytest.mark.engine


def test_with_too_few_rows_there_is_nothing_to_do(home, rows, cli_in):
    QueryLog(home / "queries.db").append(rows[:20])
    assert "nothing to do: 20 rows wait, 60 are wanted" in cli_in(home).run("refresh", "--recipe", "tiny")
    assert registry_of(home).champion("draft").number == 1


def test_each_row_is_trained_on_once(home, rows, cli_in):
    cli, log = cli_in(home), QueryLog(home / "queries.db")
    log.append(rows)
    output = cli.run("refresh", "--recipe", "tiny")
    versions = registry_of(home).versions("draft")
    assert [version.number for version in versions] == [2, 1]
    assert "promoted: draft 2" in output
    champion = registry_of(home).champion("draft")
    assert champion.number == 2
    assert champion.tags["parent"] == "1"
    assert (champion.tags["window_first_seq"], champion.tags["window_last_seq"]) == ("1", str(len(rows)))
    assert champion.tags["gate"] == "passed"
    assert log.cursor() == len(rows)
    assert "nothing to do" in cli.run("refresh", "--recipe", "tiny")

    _forget_commit(home)  # as if the run had died between the promotion and the commit
    assert "already trained: draft 2" in cli.run("refresh", "--recipe", "tiny")
    assert log.cursor() == len(rows)
    assert len(registry_of(home).versions("draft")) == 2


def _forget_commit(home: Path) -> None:
    with closing(sqlite3.connect(home / "queries.db", isolation_level=None)) as db:
        db.execute("DELETE FROM committed")
        db.execute("UPDATE counters SET value = 0 WHERE name = 'cursor'")
