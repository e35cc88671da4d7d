"""The database on SQLite and on Postgres: transactions, versions of the schema, locks, and what is said of faults."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, inspect, select, text, update

from infra import database as module
from infra.database import Database, DatabaseTorn, DatabaseUnavailable
from infra.tables import METADATA, SCHEMA_VERSION, counters, erasures


@pytest.fixture
def database(place: Path | str) -> Iterator[Database]:
    database = Database(place)
    yield database
    database.close()


def dropped(database: Database) -> int:
    with database.reading() as connection:
        return connection.execute(select(counters.c.value).where(counters.c.name == "dropped")).scalar_one()


def content(database: Database) -> bytes:
    return database.file.read_bytes() if database.file is not None else b""


def drop(database: Database, number: int = 1) -> None:
    with database.writing() as connection:
        change = update(counters).where(counters.c.name == "dropped")
        connection.execute(change.values(value=counters.c.value + number))


def test_what_a_block_wrote_holds_if_it_ends_and_is_undone_if_it_raises(database: Database) -> None:
    drop(database)
    with pytest.raises(RuntimeError), database.writing() as connection:
        connection.execute(update(counters).values(value=9))
        raise RuntimeError
    assert dropped(database) == 1


def test_a_reader_sees_one_moment_while_others_write(database: Database) -> None:
    query = select(counters.c.value).where(counters.c.name == "dropped")
    with database.reading() as connection:
        before = connection.execute(query).scalar_one()
        drop(database)
        assert connection.execute(query).scalar_one() == before == 0
    assert dropped(database) == 1


def test_a_writer_waits_for_the_one_before_it_and_is_told_when_that_takes_too_long(database, monkeypatch) -> None:
    drop(database)
    done = threading.Event()

    def second() -> None:
        drop(database)
        done.set()

    thread = threading.Thread(target=second)
    with database.writing():
        thread.start()
        assert not done.wait(0.1)
    thread.join()
    assert dropped(database) == 2
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.2)
    database.close()
    with database.writing(), pytest.raises(DatabaseUnavailable, match="lock"):
        drop(database)


def test_a_lock_is_held_by_one_or_shared_by_several(database: Database) -> None:
    with database.lock("readers", shared=True) as first, database.lock("readers", shared=True) as second:
        assert (first, second) == (True, True)
        with database.lock("readers", wait_s=0) as third, database.lock("other", wait_s=0) as other:
            assert (third, other) == (False, True)
    with database.lock("readers", wait_s=0) as alone:
        assert alone


def test_the_clock_is_the_databases(database: Database) -> None:
    with database.reading() as connection:
        assert abs(database.now_ms(connection) - time.time() * 1000) < 60_000


@pytest.mark.parametrize("version", [module.FIRST_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_is_refused_naming_both_versions_and_left_as_it_is(database: Database, version: int) -> None:
    with database.writing() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = {version}"))
        if database.file is not None:
            connection.execute(text(f"PRAGMA user_version = {version}"))
    database.close()
    before, refused = content(database), f"schema version {version}, .* reads {SCHEMA_VERSION} alone"
    with pytest.raises(ValueError, match=refused), database.reading():
        pass
    database.close()
    assert content(database) == before


def test_a_torn_file_is_told_from_one_that_is_busy_and_what_comes_in_its_place_is_read(tmp_path: Path) -> None:
    writer, database, good = (Database(tmp_path / name) for name in ("queries.db", "queries.db", "good.db"))
    drop(writer, 1)
    drop(good, 2)
    assert dropped(database) == 1  # over a connection that has read little more
    assert writer.empty_wal()
    for one in (writer, good):
        one.close()
    (tmp_path / "queries.db").write_bytes(b"torn" * 4096)
    with pytest.raises(DatabaseTorn, match=r"queries\.db is torn .*: redraft restore FILE"), database.reading() as torn:
        torn.execute(select(erasures)).all()
    (tmp_path / "good.db").replace(tmp_path / "queries.db")
    assert dropped(database) == 2
    database.close()


def test_an_older_schema_is_migrated_by_the_steps_that_follow_it(database, tmp_path, monkeypatch) -> None:
    drop(database)
    database.close()
    (tmp_path / "first.py").write_text(f"revision, down_revision = '{SCHEMA_VERSION}', None\n")
    (tmp_path / "second.py").write_text(
        "import sqlalchemy\nfrom alembic import op\n"
        f"revision, down_revision = '{SCHEMA_VERSION + 1}', '{SCHEMA_VERSION}'\n"
        "def upgrade():\n    op.add_column('erasures', sqlalchemy.Column('note', sqlalchemy.Text))\n"
    )
    monkeypatch.setattr(module, "MIGRATIONS", tmp_path)
    monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    with database.reading() as connection:
        assert "note" in {column["name"] for column in inspect(connection).get_columns("erasures")}
    assert dropped(database) == 1
    drop(database)


def test_the_migrations_lead_to_the_schema_that_a_new_database_gets() -> None:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(module.MIGRATIONS), version_locations=[str(module.MIGRATIONS)])
    assert (scripts.get_current_head(), scripts.get_bases()) == (str(SCHEMA_VERSION), [str(module.FIRST_VERSION)])


def test_a_database_of_the_first_schema_gets_the_tables_that_came_since(database: Database) -> None:
    with database.writing() as connection:
        for table in ("fleets", "replicas"):
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{module.FIRST_VERSION}'"))
        if database.file is not None:
            connection.execute(text(f"PRAGMA user_version = {module.FIRST_VERSION}"))
    database.close()
    test_a_new_database_has_the_tables_that_are_declared(database)


def test_a_new_database_has_the_tables_that_are_declared(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [one for one in compare_metadata(context, METADATA) if "alembic_version" not in str(one)] == []


def test_a_value_that_no_column_holds_is_bad_input(database: Database) -> None:
    row = {"number": 2**70, "step": 0, "certificate": ""}
    with pytest.raises(ValueError, match="can't hold a value"), database.writing() as connection:
        connection.execute(insert(erasures), row)


@pytest.mark.parametrize(
    "address",
    ["mysql://host/name?schema=a", "postgresql://host/name", "postgresql://host/name?schema=A-b", "nonsense"],
)
def test_an_address_that_names_no_postgres_schema_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(ValueError, match=r"wanted a file or postgresql://user@host/database\?schema=NAME") as caught:
        Database(address.replace("//", "//user:secret@"))
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_told_in_one_line_without_the_password() -> None:
    gone = Database("postgresql://user:secret@127.0.0.1:1/name?schema=a")
    with pytest.raises(DatabaseUnavailable, match=r"\(schema a\): .*refused") as caught, gone.reading():
        pass
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
