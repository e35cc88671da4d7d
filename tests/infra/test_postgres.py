"""What only a log on Postgres has: days that are dropped, schemas of homes, servers that may only be read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from infra.backup import back_up, restore
from infra.database import DAY_MS, HAS_LZ4, DatabaseUnavailable, days
from infra.erasures import DONE
from infra.querylog import QueryLog
from infra.settings import Settings, load_settings
from tests.infra.conftest import new_schema
from tests.infra.rows import content_of, erase, row

pytestmark = pytest.mark.postgres


@pytest.fixture
def place(postgres: str) -> Iterator[str]:
    yield from new_schema(postgres)


def on_day(name: str, day: int, subject: str | None = None) -> object:
    return row(name, subject=subject).model_copy(update={"time_ms": day * DAY_MS + 5})


def days_of(log: QueryLog) -> list[int]:
    with log.database.reading() as connection:
        return days(connection)


def test_each_day_of_rows_has_a_partition_however_far_off_it_is(log: QueryLog) -> None:
    rows = [on_day("a1", 20_000), on_day("a2", 20_001), on_day("a3", 20_000), on_day("a4", -7)]
    assert log.append(rows) == 4
    assert days_of(log) == [-7, 20_000, 20_001]
    assert [found.id for found in log.rows(1, 9)] == ["a1", "a2", "a3", "a4"]


def test_bodies_are_compressed_as_fast_as_the_server_can(log: QueryLog) -> None:
    log.append([on_day("a1", 20_000)])
    of_bodies = "SELECT attcompression FROM pg_attribute WHERE attrelid = 'bodies_20000'::regclass"
    with log.database.reading() as connection:
        has_lz4 = connection.execute(HAS_LZ4).scalar_one()
        found = connection.execute(text(f"{of_bodies} AND attname = 'body'")).scalar_one()
    assert found == ("l" if has_lz4 else "")


def test_retention_drops_whole_days_and_deletes_what_is_too_old_of_the_last_one(log: QueryLog) -> None:
    log.append([on_day("a1", 20_000), on_day("a2", 20_001), on_day("a3", 20_002), on_day("a4", 20_002)])
    with log.database.writing() as connection:  # an hour later on the same day
        for table in ("rows", "bodies"):
            connection.execute(text(f"UPDATE {table} SET time_ms = time_ms + 3600000 WHERE seq = 4"))
    certificate = log.erasures.begin(older_than_ms=20_002 * DAY_MS + 1000)
    assert certificate.rows == 3
    assert days_of(log) == [20_000, 20_001, 20_002]  # until their text was looked for elsewhere
    assert [found.id for found in log.rows(1, 9)] == ["a4"]
    assert [found.id for found in log.erasures.rows(certificate.number)] == ["a1", "a2", "a3"]
    log.erasures.forget(certificate.number)
    assert days_of(log) == [20_002]
    remains = content_of(log)
    assert [f"prompt of a{number}".encode() in remains for number in (1, 2, 3, 4)] == [False, False, False, True]


def test_an_id_is_unique_over_days_and_a_dropped_day_may_come_again(log: QueryLog) -> None:
    assert log.append([on_day("a1", 20_000), on_day("a2", 20_001)]) == 2
    assert log.append([on_day("a1", 20_005)]) == 0
    assert erase(log, older_than_ms=20_001 * DAY_MS).rows == 1
    assert log.append([on_day("a1", 20_000), on_day("a3", 20_000)]) == 2
    assert [(found.seq, found.id) for found in log.rows(1, 9)] == [(2, "a2"), (3, "a1"), (4, "a3")]


def test_a_day_that_two_erasures_are_at_is_dropped_by_the_second(log: QueryLog) -> None:
    log.append([on_day("a1", 20_000, "s1"), on_day("a2", 20_000, "s2")])
    first, second = log.erasures.begin(("s1",)), log.erasures.begin(("s2",))
    log.erasures.forget(first.number)
    assert days_of(log) == [20_000]
    assert [found.id for found in log.erasures.rows(second.number)] == ["a2"]
    log.erasures.forget(second.number)
    log.erasures.enter(second, DONE)
    assert (days_of(log), b"prompt of" in content_of(log)) == ([], False)


def test_two_homes_on_one_database_have_logs_of_their_own_unless_they_name_one_schema(postgres, tmp_path) -> None:
    def of(home: str, address: str = postgres) -> QueryLog:
        return QueryLog(load_settings({"REDRAFT_HOME": str(tmp_path / home), "REDRAFT_QUERYLOG": address}).querylog)

    one, other = of("one"), of("other")
    one.append([row("a1")])
    assert (one.stats().total, other.stats().total) == (1, 0)
    assert one.database.schema != other.database.schema
    again = of("one")
    assert again.stats().total == 1
    for log in (one, other):
        with log.database.writing() as connection:
            connection.execute(text(f"DROP SCHEMA {log.database.schema} CASCADE"))
    for log in (one, other, again):
        log.close()
    shared = f"{postgres}&schema=team"
    assert of("one", shared).database.schema == of("other", shared).database.schema


def test_a_log_that_may_only_be_read_is_read_and_takes_no_row_and_none_is_made_there(log: QueryLog, place: str) -> None:
    reader = QueryLog(f"{place}&options=-cdefault_transaction_read_only%3Don")
    with pytest.raises(DatabaseUnavailable, match="cannot execute CREATE SCHEMA in a read-only transaction"):
        reader.stats()
    log.append([row("a1")])
    assert [found.id for found in reader.rows(1, 9)] == ["a1"]
    with pytest.raises(DatabaseUnavailable, match="cannot execute .* in a read-only transaction"):
        reader.append([row("a2")])
    reader.close()


def test_a_writer_whose_process_stands_still_is_cut_off_and_another_one_goes_on(log, place, monkeypatch) -> None:
    log.append([row("a1")])
    monkeypatch.setattr("infra.database.STUCK_S", 1)
    still = QueryLog(place)
    with pytest.raises(DatabaseUnavailable), still.database.writing():
        assert log.append([row("a2")]) == 1  # waits until the other one has lost its connection
    assert still.append([row("a3")]) == 1
    still.close()


def test_a_backup_names_the_tool_that_backs_up_a_postgres(place: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, querylog=place)
    for command in (lambda: back_up(settings, tmp_path / "a.tar"), lambda: restore(settings, tmp_path / "a.tar", 0)):
        with pytest.raises(ValueError, match="use pg_dump"):
            command()


def test_whoever_lost_a_lock_with_its_connection_is_told(log: QueryLog, place: str) -> None:
    log.append([row("a1")])
    holders = "pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    with pytest.raises(DatabaseUnavailable, match="terminating connection"), log.reading():
        other = QueryLog(place)
        with pytest.raises(TimeoutError, match="is at its rows"), other.unread(wait_s=0):
            pass
        with other.database.autocommitting() as connection:
            connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM {holders}"))
        with other.unread(wait_s=60):  # nothing holds it any more
            other.close()
