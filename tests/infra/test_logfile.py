"""The query log's file, from one schema to the next."""

import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from infra import logfile
from infra.logfile import COPIES, copy_database
from infra.querylog import QueryLog
from tests.infra.rows import row, run_python


@pytest.fixture
def log(tmp_path: Path) -> QueryLog:
    """A log of the fourth schema, as the release before left it."""
    made = QueryLog(tmp_path / "queries.db")
    made.append([row("a1"), row("a2")])
    made.close()
    with closing(sqlite3.connect(made.path, isolation_level=None)) as db:
        db.executescript("ALTER TABLE rows DROP COLUMN group_hash; PRAGMA user_version = 4")
        db.execute("UPDATE rows SET body = json_remove(body, '$.group')")
    return made


@pytest.mark.slow
def test_a_log_of_the_fourth_schema_is_upgraded_once_by_processes_that_open_it_at_the_same_time(log: QueryLog) -> None:
    script = (
        "import sys; from pathlib import Path; from infra.querylog import QueryLog; from tests.infra.rows import row\n"
        "new = row(sys.argv[2]).model_copy(update={'group': sys.argv[2] * 64})\n"
        "print([one.id for one in QueryLog(Path(sys.argv[1])).rows(1, 2)], QueryLog(Path(sys.argv[1])).append([new]))"
    )
    results: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append(run_python(script, log.path, name))) for name in "bcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(done.stdout, done.stderr) for done in results] == [("['a1', 'a2'] 1\n", "")] * 3
    groups = {one.id: one.group for one in log.rows(1, 9)}
    assert groups == {"a1": None, "a2": None, "b": "b" * 64, "c": "c" * 64, "d": "d" * 64}
    with closing(sqlite3.connect(log.path)) as db:
        assert dict(db.execute("SELECT id, group_hash FROM rows").fetchall()) == groups
    with closing(sqlite3.connect(log.path.parent / COPIES / "queries-schema-4.db")) as kept:
        assert kept.execute("SELECT id FROM rows WHERE seq <= 2").fetchall() == [("a1",), ("a2",)]
    log.close()


@pytest.mark.slow
def test_what_is_kept_of_an_older_log_is_older_though_another_opens_it_meanwhile(
    log: QueryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = threading.Thread(target=lambda: QueryLog(log.path).connection())

    def slow_copy(file: Path, copy: Path) -> None:
        if not another.ident:
            another.start()
            another.join(0.5)
        copy_database(file, copy)

    monkeypatch.setattr(logfile, "copy_database", slow_copy)
    log.connection()
    another.join()
    with closing(sqlite3.connect(log.path.parent / COPIES / "queries-schema-4.db")) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (4,)
    log.close()
