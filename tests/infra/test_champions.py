"""One row decides which version is served: in races, after crashes, and when somebody moves MLflow's alias by hand."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import staged
from infra.champions import Champions
from infra.database import Database
from infra.events import ALIAS_PUT_BACK
from infra.registry import CHAMPION, Outdated, Registry
from infra.store import NotFound
from infra.versions import CLEANED, Kind, Version, is_quarantined
from tests.infra.collector import collecting
from tests.infra.rows import running_python
from tests.tags import draft_tags

Place = Path | str
Drafts = Callable[..., None]
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
def registry(store: Path, place: Place, tmp_path: Path) -> Registry:
    """A registry whose champion target is number 1."""
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "artifacts", Database(place))
    registry.promote("target", register(registry, tmp_path, "target", "target").number)
    return registry


@pytest.fixture
def drafts(registry: Registry, tmp_path: Path) -> Drafts:
    """What registers so many drafts, and makes some of them the champion, one after the other."""

    def made(count: int, *promoted: int) -> None:
        for number in range(1, count + 1):
            register(registry, tmp_path, "draft", f"draft {number}")
        for number in promoted:
            registry.promote("draft", number)

    return made


def register(registry: Registry, folder: Path, kind: Kind, content: str, **tags: str) -> Version:
    with staged(folder / "made" / content) as directory:
        (directory / "model.safetensors").write_text(content)
    return registry.register(kind, folder / "made" / content, draft_tags(**tags))


def of_another_process(registry: Registry, place: Place) -> Registry:
    return Registry(registry.store.uri, registry.store.artifact_root, Database(place))


def champion_number(registry: Registry) -> int | None:
    champion = registry.champion("draft")
    return None if champion is None else champion.number


def alias_of(registry: Registry) -> int | None:
    alias = registry.store.client.get_registered_model("draft").aliases.get(CHAMPION)
    return None if alias is None else int(alias)


class Elsewhere(Registry):
    """The same registry as another process has it; `at_write` is called before and after each write to MLflow."""

    def __init__(self, registry: Registry, place: Place, at_write: Callable[[], object]) -> None:
        from mlflow import MlflowClient  # not at the top: it reads variables that the registry sets first

        super().__init__(registry.store.uri, registry.store.artifact_root, Database(place))

        class Watched(MlflowClient):
            def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
                at_write()
                super().set_registered_model_alias(name, alias, version)
                at_write()

            def set_model_version_tag(self, *of: Any) -> None:
                at_write()
                super().set_model_version_tag(*of)
                at_write()

        self.store.client = Watched(registry.store.uri, registry.store.uri)


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
@pytest.mark.parametrize(
    "take_back", [lambda slow: slow.revert("draft", 2, "bad"), lambda slow: slow.roll_back("draft", "bad")]
)
def test_what_somebody_promotes_while_another_is_reverted_or_rolled_back_stays(
    registry: Registry, drafts: Drafts, place: Place, take_back: Callable[[Registry], object]
) -> None:
    drafts(3, 1, 2)
    pause = Pause()
    slow = Elsewhere(registry, place, pause)
    raised = together(pause, lambda: take_back(slow), lambda: registry.promote("draft", 3))
    assert (raised, champion_number(registry)) == (None, 3)
    assert [version.number for version in registry.versions("draft") if is_quarantined(version)] == [2]
    assert registry.get("draft", 3).previous == 1


@pytest.mark.slow
def test_of_two_that_were_gated_against_one_champion_the_first_is_promoted(
    registry: Registry, drafts: Drafts, place: Place
) -> None:
    drafts(3, 1)
    pause = Pause()
    slow = Elsewhere(registry, place, pause)
    raised = together(
        pause,
        lambda: slow.promote("draft", 2, expected_champion=1),
        lambda: registry.promote("draft", 3, expected_champion=1),
    )
    assert isinstance(raised, Outdated)
    assert "gated against draft 1, which is no longer the champion: that is 2" in str(raised)
    assert champion_number(registry) == 2
    assert not registry.get("draft", 3).was_champion


@pytest.mark.slow
def test_of_fifty_processes_of_two_homes_one_promotes(
    registry: Registry, drafts: Drafts, place: Place, tmp_path: Path
) -> None:
    drafts(51, 1)
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


def test_a_process_that_lost_the_lock_replaces_no_other_champion_than_it_saw(
    registry: Registry, drafts: Drafts, place: Place
) -> None:
    drafts(3, 1)
    rows = Champions(Database(place))
    slow = Elsewhere(registry, place, lambda: rows.swap("draft", 1, 3, 1))
    with pytest.raises(Outdated, match="draft 1 is no longer the champion: another process replaced it just now"):
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
def test_whenever_a_process_is_killed_the_next_one_finds_one_champion_and_mlflow_names_it(
    registry: Registry, drafts: Drafts, place: Place, goes_back: bool
) -> None:
    drafts(2, 1)
    for step in range(20):
        if goes_back and champion_number(registry) == 1:
            registry.promote("draft", 2)
        old = champion_number(registry)
        new, dying = 3 - (old or 0), Elsewhere(registry, place, Death(step))
        try:
            dying.roll_back("draft") if goes_back else dying.promote("draft", new)
        except Killed:
            died = True
        else:
            died = False
        again = of_another_process(registry, place)
        assert champion_number(again) == alias_of(again) == new  # the row had changed before the first write to MLflow
        assert again.get("draft", 2).previous == 1
        if not goes_back:
            assert again.get("draft", new).previous == old
        if not died:
            return
    raise AssertionError("it died at every step")


def test_a_version_that_somebody_makes_the_champion_in_mlflow_becomes_it_and_can_be_rolled_back(
    registry: Registry, drafts: Drafts, place: Place
) -> None:
    drafts(2, 1)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    assert champion_number(of_another_process(registry, place)) == alias_of(registry) == 2
    assert registry.get("draft", 2).previous == 1
    assert registry.roll_back("draft").number == champion_number(registry) == alias_of(registry) == 1


def quarantine(registry: Registry, folder: Path) -> None:
    registry.quarantine("draft", 2, "another output")


def clean(registry: Registry, folder: Path) -> None:
    registry.store.client.set_model_version_tag("draft", "2", CLEANED, "2026-11-30")


def damage(registry: Registry, folder: Path) -> None:
    registry.store.client.delete_model_version_tag("draft", "2", "sha256")


def replace_target(registry: Registry, folder: Path) -> None:
    registry.promote("target", register(registry, folder, "target", "another", target_sha256="b").number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (quarantine, "draft 2 is quarantined: another output"),
        (clean, "the files of draft 2 were cleaned away on 2026-11-30"),
        (damage, "draft 2 was not registered by redraft: it has no tag sha256"),
        (replace_target, "draft 2 was made for target 1, not for the champion: that is 2"),
    ],
)
def test_an_alias_that_was_moved_to_what_may_not_serve_is_put_back_and_an_event_tells(
    registry: Registry,
    drafts: Drafts,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Registry, Path], None],
    why: str,
) -> None:
    drafts(2, 1)
    spoil(registry, tmp_path)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    with collecting() as orchestrator:
        monkeypatch.setenv("PREFECT_API_URL", orchestrator.api)
        assert champion_number(registry) == alias_of(registry) == 1
        assert champion_number(registry) == 1
    told = f"alias champion of draft, moved in MLflow, is put back to 1: {why}"
    assert caplog.messages.count(told) == 1
    (event,) = orchestrator.got
    assert (event["event"], event["payload"]) == (ALIAS_PUT_BACK, {"text": told})
    assert not registry.get("draft", 1).previous


def test_an_alias_that_somebody_removed_is_put_back(
    registry: Registry, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    drafts(2, 1, 2)
    registry.store.client.delete_registered_model_alias("draft", CHAMPION)
    assert champion_number(registry) == alias_of(registry) == 2
    assert registry.get("draft", 2).previous == 1
    assert "is put back to 2: the alias was removed" in caplog.text


def test_where_somebody_deleted_the_champion_there_is_none_until_the_next_promotion(
    registry: Registry, drafts: Drafts, caplog: pytest.LogCaptureFixture
) -> None:
    drafts(2, 1, 2)
    registry.store.client.delete_model_version("draft", "2")
    assert champion_number(registry) is None
    assert "draft 2, the champion, is gone from MLflow: there is none now" in caplog.text
    with pytest.raises(NotFound, match="there is no champion"):
        registry.roll_back("draft")
    registry.promote("draft", 1)
    assert champion_number(registry) == alias_of(registry) == 1


def test_where_there_is_no_row_yet_it_begins_with_what_mlflow_names(
    registry: Registry, drafts: Drafts, place: Place
) -> None:
    drafts(3)
    rows = Champions(Database(place))
    assert (champion_number(registry), rows.row("draft")) == (None, None)
    registry.store.client.set_registered_model_alias("draft", CHAMPION, "2")
    registry.quarantine("draft", 2, "bad")  # what it names is taken as it is
    assert champion_number(registry) == 2
    assert (row := rows.row("draft")) is not None
    assert (row.version, row.copied) == (2, True)
    registry.promote("draft", 1, expected_champion=None)
    assert registry.get("draft", 1).previous == 2


def test_who_reads_a_row_learns_when_and_by_whom_it_was_changed(
    registry: Registry, drafts: Drafts, place: Place
) -> None:
    drafts(2, 1, 2)
    database = Database(place)
    with database.reading() as connection:
        now_ms = database.now_ms(connection)
    assert (row := Champions(database).row("draft")) is not None
    assert (row.version, row.previous, row.copied) == (2, 1, True)
    assert row.changed_by
    assert row.changed_ms <= now_ms
