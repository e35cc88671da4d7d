import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from alembic.runtime.migration import HeadMaintainer
from sqlalchemy import inspect

from infra.database import Database
from infra.events import ALIAS_PUT_BACK
from infra.registry import CHAMPION, Outdated, Registry
from infra.settings import Settings
from infra.store import Champions, NotFound, Store
from infra.versions import CLEANED, is_quarantined
from tests.conftest import ODD_NAME
from tests.infra.collector import collecting
from tests.infra.conftest import Make, champion_number
from tests.infra.rows import running_python
from tests.tags import draft_tags

Place = Path | str
RACERS = """
import os, sys
from pathlib import Path
from infra.database import Database
from infra.registry import Outdated, Registry
uri, root, address, first, last = sys.argv[1:]
numbers = range(int(first), int(last) + 1)
database = Database(address if address.startswith("postgresql") else Path(address))
registry = Registry(uri, Path(root), database)
registry.get("draft", 1)  # what takes long is done once, and no connection is handed on
registry.store.client._get_registry_client().store._dispose_engine()
for number in numbers:
    if not os.fork():
        try:
            os.read(0, 1)  # all begin when the test closes it
            registry.promote("draft", number, expected_champion=1)
            os.write(1, f"promoted {number}\\n".encode())
        except Outdated:
            os.write(1, b"outdated\\n")
        finally:
            os._exit(0)
print("ready", flush=True)
for _ in numbers:
    os.wait()
"""


@pytest.fixture
def mlflow_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    (tmp_path / ODD_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / ODD_NAME)
    (settings.home / "mlflow.db").write_bytes(store.read_bytes())
    return Store(settings.mlflow_uri, settings.artifacts)


def test_a_run_is_recorded_with_its_params_metrics_and_files(mlflow_store: Store, tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    figure.write_text("<svg/>")
    run_id = mlflow_store.record_run("gate", {"K": 3, "domains": ["chat"]}, {"gain": 0.5}, [figure])
    assert mlflow_store.recorded("gate") == [{"gain": 0.5}]
    assert mlflow_store.recorded("other") == []
    (stored,) = (tmp_path / ODD_NAME / "artifacts").rglob("figure.svg")
    assert stored.parts[-3] == run_id
    assert stored.read_text() == "<svg/>"
    assert {path.name for path in tmp_path.iterdir()} == {ODD_NAME, figure.name}
    assert (tmp_path / ODD_NAME / "mlflow.db").read_bytes()[18:20] == b"\x02\x02"  # write-ahead logging


def test_a_first_use_that_is_interrupted_between_tables_leaves_what_the_next_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, own = Settings(home=tmp_path / ODD_NAME), HeadMaintainer.update_to_step

    def interrupted(maintainer: Any, step: Any) -> None:  # before MLflow notes the migration that it just made
        if inspect(maintainer.context.connection).has_table("assessments"):
            raise KeyboardInterrupt
        own(maintainer, step)

    store = Store(settings.mlflow_uri, settings.artifacts)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(HeadMaintainer, "update_to_step", interrupted)
        store.recorded("gate")
    assert Store(settings.mlflow_uri, settings.artifacts).recorded("gate") == []


def test_a_metric_that_is_not_finite_is_refused_and_nothing_is_recorded(mlflow_store: Store) -> None:
    with pytest.raises(ValueError, match="metric gain is nan, wanted a finite number"):
        mlflow_store.record_run("gate", {}, {"gain": float("nan")}, [])
    assert mlflow_store.recorded("gate") == []


@pytest.fixture
def registry(stocked: Path, place: Place, tmp_path: Path) -> Registry:
    """A registry of three drafts, whose champion target is number 1."""
    (tmp_path / "mlflow.db").write_bytes(stocked.read_bytes())
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", stocked.with_name("artifacts"), Database(place))
    registry.promote("target", 1)
    return registry


def alias_of(registry: Registry) -> int | None:
    alias = registry.store.client.get_registered_model("draft").aliases.get(CHAMPION)
    return None if alias is None else int(alias)


class Elsewhere(Registry):
    """The same registry as another process has it; `at_write` is called before and after each write to MLflow."""

    def __init__(self, registry: Registry, place: Place, at_write: Callable[[], object]) -> None:
        super().__init__(registry.store.uri, registry.store.artifact_root, Database(place))
        for name in ("set_registered_model_alias", "set_model_version_tag"):
            setattr(self.store.client, name, watched(getattr(self.store.client, name), at_write))


def watched(write: Callable[..., None], at_write: Callable[[], object]) -> Callable[..., None]:
    def at(*of: Any) -> None:
        at_write()
        write(*of)
        at_write()

    return at


class Pause:
    """What stands still, the first time, until it may go on."""

    def __init__(self) -> None:
        self.arrived, self.may_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.arrived.set()
        assert self.may_go.wait(60)


def together(pause: Pause, first: Callable[[], object], second: Callable[[], object]) -> BaseException | None:
    """Start `second` while `first` stands in the middle; return what `second` raised."""
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert pause.arrived.wait(60)
        two = pool.submit(second)
        wait([two], timeout=0.5)  # who does not wait for `first` is done by now
        pause.may_go.set()
        one.result(30)
        return two.exception(30)


@pytest.mark.slow
@pytest.mark.parametrize("take_back", ["revert", "roll_back"])
def test_what_somebody_promotes_while_another_is_taken_back_stays(registry, promote, place, take_back) -> None:
    promote(1, 2)
    slow = Elsewhere(registry, place, pause := Pause())
    arguments = {"revert": ("draft", 2, "bad"), "roll_back": ("draft", "bad")}[take_back]
    raised = together(pause, lambda: getattr(slow, take_back)(*arguments), lambda: registry.promote("draft", 3))
    assert (raised, champion_number(registry)) == (None, 3)
    assert [version.number for version in registry.versions("draft") if is_quarantined(version)] == [2]
    assert registry.get("draft", 3).previous == 1


@pytest.mark.slow
def test_of_two_that_were_gated_against_one_champion_the_first_is_promoted(registry, promote, place) -> None:
    promote(1)
    slow = Elsewhere(registry, place, pause := Pause())
    first, second = (
        lambda: slow.promote("draft", 2, expected_champion=1),
        lambda: registry.promote("draft", 3, expected_champion=1),
    )
    raised = together(pause, first, second)
    assert isinstance(raised, Outdated)
    assert "draft 1, which is no longer the champion: that is 2" in str(raised)
    assert champion_number(registry) == 2
    assert not registry.get("draft", 3).was_champion


@pytest.mark.slow
def test_of_fifty_processes_of_two_homes_one_promotes(registry, promote, place, checkpoint, tmp_path) -> None:
    promote(1)
    for number in range(4, 52):
        registry.register("draft", checkpoint(f"draft {number}"), draft_tags())
    with ExitStack() as stack:
        homes = [
            stack.enter_context(running_python(RACERS, registry.store.uri, tmp_path / name, place, *numbers))
            for name, *numbers in (("one", 2, 26), ("two", 27, 51))
        ]
        assert [told for _, told in homes] == ["ready", "ready"]
        for process, _ in homes:
            assert process.stdin is not None
            process.stdin.close()
        told = [line.strip() for process, _ in homes for line in process.stdout or ()]
    assert sorted(told) == ["outdated"] * 49 + [f"promoted {champion_number(registry)}"]
    assert alias_of(registry) == champion_number(registry)
    assert sum(version.was_champion for version in registry.versions("draft")) == 2


def test_a_process_that_lost_the_lock_replaces_no_other_champion_than_it_saw(registry, promote, place) -> None:
    promote(1)
    rows = Champions(Database(place))
    slow = Elsewhere(registry, place, lambda: rows.replace("draft", 1, 3, 1))
    with pytest.raises(Outdated, match="draft 1 is no longer the champion"):
        slow.promote("draft", 2, forced="I want it")
    assert champion_number(registry) == alias_of(registry) == 3
    assert not registry.get("draft", 2).was_champion


class Killed(BaseException):
    pass


class Death:
    """Ends a process at its nth step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("goes_back", [False, True])
def test_whenever_a_process_is_killed_the_next_one_finds_one_champion(registry, promote, place, goes_back) -> None:
    promote(1)
    for step in range(20):
        if goes_back and champion_number(registry) == 1:
            registry.promote("draft", 2)
        old = champion_number(registry)
        new, dying = 3 - (old or 0), Elsewhere(registry, place, Death(step))
        died = False
        try:
            dying.roll_back("draft") if goes_back else dying.promote("draft", new)
        except Killed:
            died = True
        again = Registry(registry.store.uri, registry.store.artifact_root, Database(place))
        assert champion_number(again) == alias_of(again) == new  # the row had changed before the first write to MLflow
        assert again.get("draft", 2).previous == 1
        if not goes_back:
            assert again.get("draft", new).previous == old
        if not died:
            return
    raise AssertionError("it died at every step")


def test_a_version_that_somebody_makes_the_champion_in_mlflow_becomes_it_and_can_be_rolled_back(registry, promote):
    promote(1)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    assert champion_number(registry) == alias_of(registry) == 2
    assert registry.get("draft", 2).previous == 1
    assert registry.roll_back("draft").number == champion_number(registry) == alias_of(registry) == 1


def replace_target(registry: Registry, checkpoint: Make) -> None:
    tags = draft_tags(target_sha256="b")
    registry.promote("target", registry.register("target", checkpoint("another"), tags).number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda registry, _: registry.quarantine("draft", 2, "another output"), "is quarantined: another output"),
        (
            lambda registry, _: registry.store.client.set_model_version_tag("draft", "2", CLEANED, "2026-11-30"),
            "were cleaned away on 2026-11-30",
        ),
        (
            lambda registry, _: registry.store.client.delete_model_version_tag("draft", "2", "sha256"),
            "was not registered by redraft: it has no tag sha256",
        ),
        (replace_target, "was made for target 1, not for the champion: that is 2"),
    ],
    ids=["quarantined", "cleaned", "damaged", "another target"],
)
def test_an_alias_that_was_moved_to_what_may_not_serve_is_put_back_and_an_event_tells(
    registry, promote, checkpoint, caplog, monkeypatch, spoil, why
) -> None:
    promote(1)
    spoil(registry, checkpoint)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    with collecting() as orchestrator:
        monkeypatch.setenv("PREFECT_API_URL", orchestrator.api)
        assert champion_number(registry) == alias_of(registry) == 1
        assert champion_number(registry) == 1
    (told,) = [message for message in caplog.messages if "put back to 1: " in message and message.endswith(why)]
    (event,) = orchestrator.got
    assert (event["event"], event["payload"]) == (ALIAS_PUT_BACK, {"text": told})
    assert not registry.get("draft", 1).previous


def test_an_alias_that_somebody_removed_is_put_back(registry, promote, caplog) -> None:
    promote(1, 2)
    registry.store.client.delete_registered_model_alias("draft", CHAMPION)
    assert champion_number(registry) == alias_of(registry) == 2
    assert registry.get("draft", 2).previous == 1
    assert "is put back to 2: the alias was removed" in caplog.text


def test_where_somebody_deleted_the_champion_there_is_none_until_the_next_promotion(registry, promote, caplog) -> None:
    promote(1, 2)
    registry.store.client.delete_model_version("draft", "2")
    assert champion_number(registry) is None
    assert "draft 2, the champion, is gone from MLflow" in caplog.text
    with pytest.raises(NotFound, match="there is no champion"):
        registry.roll_back("draft")
    registry.promote("draft", 1)
    assert champion_number(registry) == alias_of(registry) == 1


def test_where_there_is_no_row_yet_it_begins_with_what_mlflow_names_and_then_tells_when_and_who(registry, place):
    rows = Champions(database := Database(place))
    assert (champion_number(registry), rows.row("draft")) == (None, None)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    registry.quarantine("draft", 2, "bad")  # what it names is taken as it is
    assert champion_number(registry) == 2
    begun = rows.row("draft")
    assert (begun.version, begun.copied) == (2, True)
    with database.reading() as connection:
        before_ms = database.now_ms(connection)
    registry.promote("draft", 1, expected_champion=None)
    row = rows.row("draft")
    assert (row.version, row.previous, row.copied, registry.get("draft", 1).previous) == (1, 2, True, 2)
    assert row.changed_by
    assert begun.changed_ms <= before_ms <= row.changed_ms
