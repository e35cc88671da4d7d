import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from infra.processes import wait_until
from infra.querylog import BackgroundWriter, QueryLog
from tests.infra.rows import row, run_python
from tests.postgres import PostgresServer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "queries.db"


@pytest.fixture
def writer(log: QueryLog) -> Iterator[Callable[..., BackgroundWriter]]:
    """What starts a writer, which is closed after the test."""
    with ExitStack() as started:
        yield lambda **settings: started.enter_context(closing(BackgroundWriter(log, **settings)))


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
    time.sleep(0.1)
    before = num_wakes()
    time.sleep(0.3)
    assert num_wakes() == before
    background.close()
    assert not thread.is_alive()


def test_the_writer_refuses_what_may_not_be_logged(writer: Callable[..., BackgroundWriter]) -> None:
    with pytest.raises(ValueError, match="consent 'none'"):
        writer().offer(row("a1").model_copy(update={"consent": "none"}))


@contextmanager
def locked(place: Path | str) -> Iterator[None]:
    """Let another one write to the log for as long as the context lasts."""
    other = QueryLog(place)
    with other.database.writing():
        yield
    other.close()


@pytest.fixture
def busy(log: QueryLog, place: Path | str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    """A log of one row that another one writes to for as long as the context lasts, and which is soon given up."""
    monkeypatch.setattr("infra.database.BUSY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("infra.querylog.RETRY_S", 0.05)
    log.append([row("first")])
    log.close()
    return locked(place)


@pytest.mark.slow
def test_rows_wait_for_a_database_that_is_busy_and_only_those_are_lost_that_find_the_queue_full(
    log, busy, writer, caplog
) -> None:
    with busy:
        background = writer(capacity=4, batch=2)
        offered = sum(background.offer(row(f"a{number}")) for number in range(20))
        wait_until(lambda: background.last_error is not None, 60, None, "a refused batch")
        time.sleep(0.6)  # several tries
    assert "lock" in str(background.last_error)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"the query log takes no rows: {background.last_error}"]  # once
    wait_until(lambda: background.written == offered, 60, None, "the rows that waited")
    background.close()
    stats = log.stats()
    assert stats.dropped == background.dropped == 20 - offered > 0
    assert stats.total == offered + 1


@pytest.mark.slow
def test_a_writer_that_closes_gives_up_a_database_that_stays_busy_and_counts_its_rows(busy, writer) -> None:
    with busy:
        background = writer(batch=2)
        assert all(background.offer(row(f"a{number}")) for number in range(5))
        background.close(timeout_s=0.5)
        wait_until(lambda: background.dropped == 5, 60, None, "the rows to be counted as lost")
    assert background.written == 0


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda path: run_sql(path, "PRAGMA user_version = 99"), "has schema version 99"),
        (lambda path: path.write_bytes(b"torn" * 4096), "is torn .*: redraft restore FILE"),
    ],
    ids=["newer", "torn"],
)
def test_a_log_that_is_torn_or_of_another_version_drops_and_counts_until_it_can(file, spoil, fault) -> None:
    log = QueryLog(file)
    log.append([row("first")])
    log.close()
    good = file.read_bytes()
    spoil(file)
    background = BackgroundWriter(log, batch=2)
    assert all(background.offer(row(f"a{number}")) for number in range(10))
    wait_until(lambda: background.dropped == 10, 60, None, "all rows to be counted as lost")
    assert re.search(fault, background.last_error or "")
    file.with_suffix(".good").write_bytes(good)
    file.with_suffix(".good").replace(file)
    assert background.offer(row("later"))
    wait_until(lambda: background.written == 1, 60, None, "the next row")
    background.close()
    stats = log.stats()
    log.close()
    assert (stats.total, stats.dropped) == (2, 10)


def run_sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement)
        db.commit()


@pytest.mark.slow
def test_rows_wait_for_room_on_a_full_disk(file: Path) -> None:
    """A limit on the size of files, in a process of its own, makes every write of the database fail."""
    script = """
import resource, sys
from pathlib import Path
from infra.querylog import BackgroundWriter
from infra.processes import wait_until
from infra.querylog import QueryLog
from tests.infra.rows import row
log = QueryLog(Path(sys.argv[1]))
log.append([row("first")])
size = max(path.stat().st_size for path in Path(sys.argv[1]).parent.iterdir())
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
writer = BackgroundWriter(log)
for number in range(50):
    assert writer.offer(row(f"a{number}").model_copy(update={"prompt": "x" * 100_000}))
wait_until(lambda: writer.last_error is not None, 60, None, "the limit to bite")
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert writer.offer(row("later"))
writer.close()
stats = log.stats()
assert (stats.dropped, stats.total) == (writer.dropped, writer.written + 1) == (0, 52), (stats, writer.dropped)
assert log.rows(1, 99)[-1].id == "later"
print(writer.last_error)
"""
    done = run_python(script, file)
    assert done.returncode == 0, done.stderr
    assert "disk" in done.stdout


@pytest.mark.slow
@pytest.mark.postgres
def test_no_row_is_lost_when_the_server_is_restarted_between_and_during_writes(postgres_server: PostgresServer) -> None:
    log = QueryLog(f"{postgres_server.address}&schema=restarted")
    background, offered = BackgroundWriter(log), 0
    for _ in range(2):
        until = offered + 300
        while offered < until:
            assert background.offer(row(f"a{offered}"))
            offered += 1
            if offered % 100 == 50:
                postgres_server.stop()  # while some are written, and others wait
                postgres_server.start()
            time.sleep(0.001)
        wait_until(lambda: background.written == until, 60, None, "all rows")  # noqa: B023 - waited for here
        postgres_server.stop()
        postgres_server.start()
        assert log.stats().total == offered  # a connection that the restart cut off is opened anew
    background.close()
    assert (background.dropped, log.stats().dropped) == (0, 0)
    assert [found.id for found in log.latest(offered)] == [f"a{number}" for number in range(offered)]
    log.close()
