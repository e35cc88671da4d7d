import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra.logwriter import BackgroundWriter
from infra.processes import wait_until
from infra.querylog import QueryLog
from tests.infra.rows import row, run_python


@pytest.fixture
def log(tmp_path: Path) -> Iterator[QueryLog]:
    log = QueryLog(tmp_path / "below" / "queries.db")
    yield log
    log.close()


@pytest.fixture
def writer(log: QueryLog) -> Iterator[Callable[..., BackgroundWriter]]:
    started = []

    def start(**settings: int) -> BackgroundWriter:
        started.append(BackgroundWriter(log, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_writer_writes_what_it_is_offered(log: QueryLog, writer: Callable[..., BackgroundWriter]) -> None:
    background = writer(batch=3)
    assert all(background.offer(row(f"a{number}")) for number in range(10))
    background.close()
    assert (background.written, background.dropped, background.last_error) == (10, 0, None)
    assert [found.id for found in log.rows(1, 99)] == [f"a{number}" for number in range(10)]
    assert not background.offer(row("late"))
    assert background.dropped == 1


def test_a_writer_without_rows_is_never_woken_and_ends_at_once(writer: Callable[..., BackgroundWriter]) -> None:
    def num_wakes() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    background = writer()
    [thread] = [one for one in threading.enumerate() if one.name == "querylog-writer"]
    assert background.offer(row("a1"))
    wait_until(lambda: background.written == 1, 60, None, "a row")
    time.sleep(0.2)
    before = num_wakes()
    time.sleep(0.5)
    assert num_wakes() == before
    background.close()
    assert not thread.is_alive()


def test_the_writer_refuses_what_may_not_be_logged(writer: Callable[..., BackgroundWriter]) -> None:
    with pytest.raises(ValueError, match="consent 'none'"):
        writer().offer(row("a1").model_copy(update={"consent": "none"}))


@pytest.mark.slow
def test_a_locked_database_never_makes_an_offer_wait(
    log: QueryLog, writer: Callable[..., BackgroundWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([row("first")])
    log.close()
    monkeypatch.setattr("infra.logfile.BUSY_TIMEOUT_S", 600.0)
    locker = sqlite3.connect(log.path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    background = writer(capacity=4, batch=2)
    for number in range(200):
        background.offer(row(f"a{number}"))
    assert background.dropped >= 200 - 4 - 2
    assert (background.written, background.last_error) == (0, None)  # the first batch still waits for the lock
    locker.execute("ROLLBACK")
    locker.close()
    background.close()
    assert background.dropped + background.written == 200


@pytest.mark.slow
def test_batches_that_a_locked_database_refuses_are_counted_and_told_of_once(
    log: QueryLog,
    writer: Callable[..., BackgroundWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("infra.logfile.BUSY_TIMEOUT_S", 0.5)
    log.append([row("first")])
    locker = sqlite3.connect(log.path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    background = writer(capacity=4, batch=2)
    for number in range(20):
        background.offer(row(f"a{number}"))
    wait_until(lambda: background.last_error is not None, 60, None, "the first refused batch")
    assert background.last_error == "database is locked"
    refused = background.dropped
    wait_until(lambda: background.dropped > refused, 60, None, "another refused batch")
    assert [record.getMessage() for record in caplog.records] == [
        "the query log takes no rows, they are dropped and counted: database is locked"
    ]
    locker.execute("ROLLBACK")
    locker.close()
    wait_until(lambda: background.offer(row(f"z{time.monotonic_ns()}")), 60, None, "room in the queue")
    background.close()
    stats = log.stats()
    assert background.dropped > 0
    assert stats.dropped == background.dropped
    assert stats.total == background.written + 1


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda path: run_sql(path, "PRAGMA user_version = 99"), "has schema version 99"),
        (lambda path: path.write_bytes(b"torn" * 4096), "is torn .*: redraft restore FILE"),
    ],
    ids=["newer", "torn"],
)
def test_a_log_that_can_not_be_written_drops_and_counts_until_it_can(
    log: QueryLog, writer: Callable[..., BackgroundWriter], spoil: Callable[[Path], object], fault: str
) -> None:
    log.append([row("first")])
    log.close()
    good = log.path.read_bytes()
    spoil(log.path)
    background = writer(batch=2)
    assert all(background.offer(row(f"a{number}")) for number in range(10))
    wait_until(lambda: background.dropped == 10, 60, None, "all rows to be counted as lost")
    assert re.search(fault, background.last_error or "")
    log.path.with_suffix(".good").write_bytes(good)
    log.path.with_suffix(".good").replace(log.path)
    assert background.offer(row("later"))
    wait_until(lambda: background.written == 1, 60, None, "the next row")
    background.close()
    stats = log.stats()
    assert (stats.total, stats.dropped) == (2, 10)


def run_sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


def test_a_full_disk_drops_and_counts_and_later_rows_are_written(tmp_path: Path) -> None:
    """A limit on the size of files, in a process of its own, makes every write of the database fail."""
    script = """
import resource, sys
from pathlib import Path
from infra.logwriter import BackgroundWriter
from infra.processes import wait_until
from infra.querylog import QueryLog
from tests.infra.rows import row
log = QueryLog(Path(sys.argv[1]))
log.append([row("first")])
size = max(path.stat().st_size for path in log.path.parent.iterdir())
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
writer = BackgroundWriter(log)
for number in range(50):
    assert writer.offer(row(f"a{number}").model_copy(update={"prompt": "x" * 100_000}))
wait_until(lambda: writer.dropped + writer.written == 50, 60, None, "the batches")
assert writer.dropped > 0, "the limit did not bite"
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert writer.offer(row("later"))
writer.close()
stats = log.stats()
assert (stats.dropped, stats.total) == (writer.dropped, writer.written + 1), (stats, writer.dropped, writer.written)
assert log.rows(1, 99)[-1].id == "later"
print(writer.last_error)
"""
    done = run_python(script, tmp_path / "queries.db")
    assert done.returncode == 0, done.stderr
    assert "disk" in done.stdout
