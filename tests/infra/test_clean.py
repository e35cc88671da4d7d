"""What a home lets go of, and what it never does."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra import history
from infra.artifacts import staged
from infra.clean import DAY_S, clean_up
from infra.files import lock_folder
from infra.home import ray_folder
from infra.post_promotion import PostPromotionTest, PostPromotionTests
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.settings import Settings
from infra.trigger_store import TriggerStore
from infra.triggers import Retry
from models.recipe import Keep
from tests.infra.test_history import add_run, empty, fill
from tests.tags import draft_tags

__all__ = ["empty"]

BEST_IN_CODE, PRESENT = 2, 6
LIMITS = Keep(num_drafts=1, days=30, gib=1, log_mib=0.5)


class Home:
    """Drafts that were promoted one after the other, the last of which was trained on a snapshot."""

    def __init__(self, home: Path, store: Path, num_champions: int = 1, **settings: str) -> None:
        home.mkdir()
        shutil.copy(store, home / "mlflow.db")
        self.settings = Settings(home=home, **settings)
        self.registry: Registry = open_registry(self.settings)
        self.log = QueryLog(self.settings.querylog)
        used = self.step("window", "used")
        for number in range(1, num_champions + 1):
            tau = '{"chat": 1.5, "code": %s}' % (1.9 if number == BEST_IN_CODE else 1.1)
            window = {"window_first_seq": "1", "window_last_seq": "9", "window_sha256": "a", "window_uri": used}
            parent = {"parent": str(number - 1)} if number > 1 else {}
            self.register(tau=tau, gate="passed", **parent, **(window if number == num_champions else {}))
            self.registry.promote("draft", number)

    def register(self, **tags: str) -> None:
        directory = self.settings.home / "made"
        with staged(directory) as staging:
            (staging / "weights").write_bytes(os.urandom(1000))
        tags = draft_tags(num_draft_tokens="3") | tags
        version = self.registry.register("draft", directory, tags)
        self.registry.download(version, self.settings.cache)

    def step(self, stage: str, name: str, age_days: float = 0.0, num_bytes: int = 10) -> str:
        folder = self.settings.local_artifacts / stage / name
        with staged(folder) as staging:
            (staging / "result").write_bytes(bytes(num_bytes))
        age(folder, age_days)
        return folder.resolve().as_uri()

    def files(self) -> dict[str, int]:
        found = [path for path in self.settings.home.rglob("[!.]*") if path.is_file() and path.suffix != ".lock"]
        return {str(path): path.stat().st_size for path in found if ".db" not in path.name}

    def clean(self, pool: int = 3, gib: float = LIMITS.gib, dry_run: bool = False) -> dict[tuple[str, str], str]:
        went = clean_up(self.settings, LIMITS.model_copy(update={"gib": gib}), pool=pool, dry_run=dry_run)
        return {(item.kind, item.name): why for item, why in went}

    def is_there(self, number: int) -> bool:
        """Return whether a draft can be fetched by who has it not in the cache."""
        try:
            self.registry.download(self.registry.get("draft", number), self.settings.home / f"fresh-{time.time_ns()}")
        except (ValueError, ConnectionError):
            return False
        return True


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then))


@pytest.fixture(autouse=True)
def _ray_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where Ray's folder is that homes with long paths share


@pytest.fixture
def home(store: Path, tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home", store)
    yield made
    made.log.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What lets so many days go by."""
    now = time.time
    return lambda days: monkeypatch.setattr("infra.clean.time.time", lambda: now() + days * DAY_S)


@pytest.mark.slow
def test_old_drafts_go_and_what_serves_or_may_serve_again_never_does(store, tmp_path, later) -> None:
    home = Home(tmp_path / "home", store, PRESENT)
    for gate in ("undecided", "refused", "refused"):
        home.register(parent=str(PRESENT), gate=gate)
    PostPromotionTests(home.settings).save(PostPromotionTest(draft=PRESENT, previous=1, num_wanted=9))
    later(40)
    before = home.files()
    told = home.clean(pool=1, dry_run=True)
    assert (home.files(), home.registry.get("draft", 3).cleaned) == (before, "")
    assert home.clean(pool=1) == told
    # 6 serves, 5 and 4 are behind it, 2 is best in code and of the pool, 1 is under test, 7 goes on learning.
    assert {number for number in range(1, 10) if home.is_there(number)} == {1, 2, 4, 5, 6, 7}
    assert {name for kind, name in told if kind == "draft"} == {"draft 3", "draft 8", "draft 9"}
    assert [version.number for version in home.registry.versions("draft")] == list(range(9, 0, -1))
    with pytest.raises(ValueError, match=r"the files of draft 3 were cleaned away on \d{4}-"):
        home.registry.promote("draft", 3)
    assert [home.registry.roll_back("draft").number for _ in range(3)] == [5, 4, 2]  # past the one that is gone
    assert (home.settings.artifacts / "window" / "used").is_dir()


@pytest.mark.slow
def test_files_of_old_drafts_leave_the_object_store_unless_another_draft_has_the_same(bucket, store, tmp_path, later):
    home = Home(tmp_path / "home", store, artifacts=bucket.address)
    served = home.registry.get("draft", 1)
    files = home.registry.download(served, home.settings.cache)
    home.registry.register("draft", files, draft_tags(parent="1", gate="refused"))  # as one that returns has them
    for _ in range(2):
        home.register(parent="1", gate="refused")
    old = home.registry.get("draft", 3)
    later(10)
    assert {name for kind, name in home.clean(pool=0) if kind == "draft"} == {"draft 2", "draft 3"}
    assert home.registry.get("draft", 2).cleaned
    assert {name.split("/")[1] for name in bucket.names()} == {served.sha256, home.registry.get("draft", 4).sha256}
    assert old.sha256 not in "".join(bucket.names())
    assert home.is_there(1)


def test_a_target_that_lies_in_the_home_stays_whatever_its_age(home: Home) -> None:
    folder = home.settings.local_artifacts / "complete_target"
    for num_bytes, name in enumerate(("old", "registered"), 10):
        home.step(folder.name, name, age_days=99, num_bytes=num_bytes)
    home.registry.register("target", folder / "registered", {}, in_place=True)
    home.clean(pool=0)
    assert [path.name for path in folder.iterdir()] == ["registered"]


def test_by_count_alone_nothing_younger_than_a_day_goes(home: Home) -> None:
    before = home.files()
    assert home.clean(pool=0, gib=1e-9) == {}
    assert home.files() == before


def test_results_of_steps_go_by_age_and_then_by_bytes_the_oldest_first(home: Home) -> None:
    for name, days in (("old", 31), ("aged", 9), ("fresher", 3), ("new", 0.5)):
        home.step("scores", name, days, num_bytes=4000)
    age(home.settings.artifacts / "window" / "used", 99)
    gib = 10_000 / 2**30
    went = {name: why for (_, name), why in home.clean(gib=gib).items()}
    assert went == {"old": "older than 30 days", "aged": f"beyond {gib:g} GiB"}
    assert (home.settings.artifacts / "window" / "used").is_dir()


def test_caches_copies_work_and_logs_are_bounded(home: Home) -> None:
    settings = home.settings
    stale = settings.cache / "draft" / "99-abc"
    works, dead = (settings.artifacts / "work" / name for name in ("live", "dead"))
    copies = [settings.home / "backups" / f"before-restore-{number}" for number in range(7)]
    for days, folder in enumerate([stale, works, dead, *copies], start=2):
        folder.mkdir(parents=True)
        age(folder, days)
    log = settings.home / "logs" / "service.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    with lock_folder(works):
        went = home.clean()
    assert went.keys() == {
        ("cache", "99-abc"),
        ("work", "dead"),
        ("copy", "before-restore-5"),
        ("copy", "before-restore-6"),
        ("log", "service.log"),
    }
    assert (works.is_dir(), dead.exists(), stale.exists(), copies[4].is_dir()) == (True, False, False, True)
    lines = log.read_text().splitlines()
    assert (lines[-1], all(line.startswith("line ") for line in lines)) == ("line 99999", True)
    assert 40_000 < len(lines) < 60_000


def test_a_look_makes_nothing_younger(home: Home) -> None:
    home.step("scores", "old", 31)
    assert [[name for _, name in home.clean(dry_run=True)] for _ in range(2)] == [["old"], ["old"]]


@pytest.mark.slow
def test_prefects_history_and_rays_sessions_go_by_age_and_bytes_and_what_runs_never_does(home, empty) -> None:
    settings, now = home.settings, datetime.now(UTC)
    old, aged, new = ((now - timedelta(days=days)).strftime("%F") for days in (40, 9, 0))
    file = history.database(settings.home)
    file.parent.mkdir()
    shutil.copy(empty, file)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        fill(db, "flow", id="flow", name="refresh")
        for number, day in enumerate((old, aged, new)):
            add_run(db, f"run {number}", day)
        add_run(db, "running", new, "RUNNING")
    names = ("2026_1_4194304", f"2026_2_{os.getpid()}", "latest")
    ended, running, latest = (ray_folder(settings.home) / f"session_{name}" for name in names)
    for session in (ended, running):
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "raylet.out").write_bytes(bytes(4000))
        age(session, 50)
    latest.symlink_to(running)
    before, gib = home.files(), 9000 / 2**30
    told = home.clean(gib=gib, dry_run=True)
    assert told.keys() == {("history", old), ("history", aged), ("session", ended.name)}
    assert (home.files(), ended.is_dir()) == (before, True)
    assert home.clean(gib=gib) == told
    assert [found.day for found in history.days(file)] == [new]
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT id FROM flow_run").fetchall() == [("run 2",), ("running",)]
    assert (ended.exists(), running.is_dir(), latest.is_dir()) == (False, True, True)


def test_while_a_refresh_runs_or_rows_are_read_it_is_put_off(home: Home) -> None:
    trigger = TriggerStore(home.log.database.file)
    with trigger.run(Retry(first_s=1, most_s=1)), pytest.raises(TimeoutError, match="a refresh runs"):
        home.clean()
    with home.log.reading(), pytest.raises(TimeoutError, match="is at its rows"):
        home.clean()
