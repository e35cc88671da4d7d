"""A home's files become rows of a Postgres, objects of a store and versions of another MLflow."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from infra import tables
from infra.artifacts import staged
from infra.database import Database, OtherSchema
from infra.home import serving
from infra.move_home import Moved, move_home
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.settings import Settings, sqlite_address
from infra.trigger_store import TriggerStore
from infra.triggers import Retry
from tests.infra.conftest import new_schema
from tests.infra.rows import erase, row, running_python
from tests.object_store import Bucket
from tests.tags import draft_tags


@pytest.fixture
def home(store: Path, tmp_path: Path) -> Settings:
    """What has rows of all kinds, and three drafts without a second one: the third is served, with reports."""
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir()
    shutil.copy(store, settings.home / "mlflow.db")
    log = QueryLog(settings.querylog)
    names = [f"a{86_400_000 * number}" for number in range(1, 8)]
    log.append([row(name, subject="b" * 64) for name in names])
    log.append([row("z999999999", consent="metadata")], dropped=2)
    log.sketches.keep(b"secret", [(2, b"\x00turn", b"\xffgrams")])
    log.erasures.record_reads("snapshot", {"train": names[:3], "held_out": names[3:5]})
    window = log.windows.claim("refresh", max_rows=4)
    assert window is not None
    log.windows.fail(window, "no 'memöry'")
    erase(log, older_than_ms=86_400_001)
    TriggerStore(settings.querylog).wish()
    log.close()
    registry, samples = open_registry(settings), settings.local_artifacts / "samples" / "one"
    with staged(samples) as directory:
        (directory / "train.jsonl").write_text("{}")
    (report := tmp_path / "gate.json").write_text('{"passed": true}')
    for number in (1, 2, 3):
        with staged(tmp_path / "made" / str(number)) as directory:
            (directory / "model.safetensors").write_text(f"draft {number}")
        tags = draft_tags(samples_uri=samples.as_uri(), samples_sha256="c" * 64)
        registry.register("draft", tmp_path / "made" / str(number), tags, {"tau": 1.5}, [report], "What it is.")
    registry.promote("draft", 1)
    registry.promote("draft", 3)
    registry.store.client.delete_model_version("draft", "2")
    return settings


@pytest.fixture
def address(postgres: str) -> Iterator[str]:
    yield from new_schema(postgres)


def contents(address: Path | str) -> dict[str, list[tuple[Any, ...]]]:
    with Database(address).reading() as connection:
        return {
            table.name: sorted((tuple(one) for one in connection.execute(select(table))), key=repr)
            for table in tables.METADATA.sorted_tables
        }


def told(registry: Registry) -> list[tuple[Any, ...]]:
    """What is known of the drafts, but where they lie."""
    return [
        (
            *(one.number, one.sha256, one.was_champion, one.previous),
            one.lineage.model_copy(update={"samples_uri": ""}),
            *(registry.attached(one, "gate.json"), registry.store.recorded("register draft")[0]),
        )
        for one in registry.versions("draft")
    ]


def move(settings: Settings) -> Moved:
    return move_home(settings, lambda said: None)


@pytest.mark.postgres
def test_rows_arrive_as_they_are_and_are_logged_on_from_there(home: Settings, address: str) -> None:
    wanted = contents(home.querylog)
    assert all(wanted[name] for name in ("rows", "bodies", "sketches", "reads", "attempts", "erasures", "champions"))
    moved = move(Settings(home=home.home, querylog=address))
    assert contents(address) == wanted
    assert moved.rows["rows"] == len(wanted["rows"]) == 7
    assert moved.copies is not None and (moved.copies / "queries.db").is_file()
    assert not home.beside_log.exists()
    assert QueryLog(address).append([row("new")]) == 1
    assert QueryLog(address).latest(1)[0].seq == 9


@pytest.mark.postgres
def test_a_move_that_is_stopped_anywhere_goes_on_and_nobody_opens_a_part(home: Settings, address: str) -> None:
    wanted, settings = contents(home.querylog), Settings(home=home.home, querylog=address)
    for most in range(1, 100):
        left = iter(range(most))

        def tell(said: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt(said)

        try:
            move_home(settings, tell)
            break
        except KeyboardInterrupt as stopped:
            assert contents(home.querylog) == wanted
            if "draft" not in str(stopped):
                with pytest.raises(OtherSchema, match="move-home"):
                    QueryLog(address).stats()
    assert most > 10
    assert contents(address) == wanted


@pytest.mark.postgres
def test_a_move_that_was_killed_at_its_very_end_is_found_to_be_complete(home: Settings, address: str) -> None:
    shutil.copytree(home.home, home.home.with_name("as it was"))
    wanted, settings = contents(home.querylog), Settings(home=home.home, querylog=address)
    move(settings)
    shutil.rmtree(home.home)
    home.home.with_name("as it was").rename(home.home)
    assert move(settings).rows["rows"] == 7
    assert contents(address) == wanted


@pytest.mark.postgres
def test_a_log_that_is_there_or_changed_on_the_way_is_not_taken_for_the_home_s(home: Settings, address: str) -> None:
    QueryLog(address).append([row("another")])
    settings = Settings(home=home.home, querylog=address)
    with pytest.raises(ValueError, match=r"rows with seq 1 .* name another schema"):
        move(settings)
    with Database(address).writing() as connection:
        connection.execute(text("DELETE FROM bodies"))
        connection.execute(text("DELETE FROM rows"))

    def meddle(said: str) -> None:
        if said == "comparing rows":
            with Database(address, moves_in=True).writing() as connection:
                connection.execute(text("UPDATE bodies SET body = '{}' WHERE seq = 5"))

    with pytest.raises(ValueError, match=r"bodies with seq 5, time_ms 432000000 "):
        move_home(settings, meddle)
    assert home.beside_log.is_file()


@pytest.mark.postgres
def test_rows_that_come_while_a_log_is_moved_are_moved_too(home: Settings, address: str) -> None:
    settings = Settings(home=home.home, querylog=address)

    def write(said: str) -> None:
        if said == "comparing rows":
            log = QueryLog(home.querylog)
            log.append([row("late")])
            log.close()

    with pytest.raises(ValueError, match="rows came while it was moved"):
        move_home(settings, write)
    with pytest.raises(OtherSchema):
        QueryLog(address).stats()
    move(settings)
    assert QueryLog(address).latest(1)[0].id == "late"


OPENS = """
import sys
from pathlib import Path
from infra.querylog import QueryLog
log = QueryLog(Path(sys.argv[1]))
log.stats()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_log_that_another_process_has_open_is_not_moved(home: Settings) -> None:
    with running_python(OPENS, home.querylog) as (process, said):
        assert said == "open"
        with pytest.raises(ValueError, match=f"process {process.pid} has .*queries.db open"):
            move(Settings(home=home.home, artifacts="s3://bucket/prefix"))


@pytest.mark.slow
def test_versions_get_their_numbers_reports_and_champion_in_another_mlflow(
    home: Settings, bucket: Bucket, tmp_path: Path
) -> None:
    wanted = told(open_registry(home))
    other = sqlite_address(tmp_path / "other" / "mlflow.db")
    settings = Settings(home=home.home, artifacts=bucket.address, mlflow_uri=other, model_prefix="llama-8b")
    assert move(settings).versions == {"target": 0, "draft": 2}
    shutil.rmtree(home.local_artifacts)
    registry = open_registry(settings)
    assert told(registry) == wanted
    champion = registry.champion("draft")
    assert champion is not None and champion.number == 3
    assert (registry.download(champion, tmp_path / "cache") / "model.safetensors").read_text() == "draft 3"
    assert champion.lineage.samples_uri.startswith(f"{bucket.address}/samples/")
    assert registry.roll_back("draft").number == 1
    with pytest.raises(ValueError, match="no files that belong elsewhere"):
        move(Settings(home=home.home, mlflow_uri=other, artifacts=bucket.address))


def test_the_same_mlflow_is_told_where_its_versions_lie_now(home: Settings, bucket: Bucket, tmp_path: Path) -> None:
    settings = Settings(home=home.home, artifacts=bucket.address)
    assert [move(settings).copies for _ in range(2)] == [None, None]  # the home's databases stay
    shutil.rmtree(home.local_artifacts)
    champion = open_registry(settings).champion("draft")
    assert champion is not None and champion.address.startswith(f"{bucket.address}/draft/")
    assert (open_registry(settings).download(champion, tmp_path / "cache") / "model.safetensors").is_file()


@pytest.mark.slow
def test_another_draft_of_the_same_number_is_left_alone(home: Settings, bucket: Bucket, tmp_path: Path) -> None:
    settings = Settings(home=home.home, artifacts=bucket.address, mlflow_uri=f"sqlite:///{tmp_path}/other.db")
    with staged(tmp_path / "theirs") as directory:
        (directory / "model.safetensors").write_text("theirs")
    theirs = open_registry(settings).register("draft", tmp_path / "theirs", draft_tags())
    with pytest.raises(ValueError, match=f"another draft 1 already: digest {theirs.sha256}"):
        move(settings)


def test_what_can_not_be_moved_is_told_before_anything_is(home: Settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set REDRAFT_QUERYLOG, REDRAFT_ARTIFACTS or REDRAFT_MLFLOW_URI"):
        move(home)
    elsewhere = Settings(home=home.home, mlflow_uri="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9 alone: set REDRAFT_ARTIFACTS"):
        move(elsewhere)
    settings = Settings(home=home.home, artifacts="s3://bucket/prefix")
    with serving(home.home, "http://127.0.0.1:8"), pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8: stop it"):
        move(settings)
    with (
        TriggerStore(home.querylog).run(Retry(first_s=1, most_s=2)),
        pytest.raises(TimeoutError, match="a refresh runs"),
    ):
        move(settings)
