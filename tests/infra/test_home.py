"""A home that the release before formats were numbered made by `redraft demo --recipe tiny` goes on working.

Of it are kept the registry with the champion pair, the query log, the service's files and its demonstration's figures.
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from infra import home
from infra.home import FORMAT_FILE, latest_format, open_home
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.serving import config_path
from infra.settings import Settings
from models.drafting.draft_families import family_named, family_of, open_draft
from tests.infra.homes.old import old_home


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The old home."""
    return old_home(tmp_path)


def contents(settings: Settings) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(settings.home.glob("*.json"))}


def format_of(settings: Settings) -> int:
    return int(json.loads((settings.home / FORMAT_FILE).read_text())["format"])


def redraft(settings: Settings, *arguments: str) -> str:
    variables = {**os.environ, "REDRAFT_HOME": str(settings.home), "COLUMNS": "200"}
    argv = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(argv, env=variables, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_commands_show_what_an_old_home_holds(settings: Settings) -> None:
    seen = json.loads(redraft(settings, "status", "--json"))
    assert format_of(settings) == latest_format()
    assert [(draft["version"], draft["champion"], draft["verdict"]) for draft in seen["drafts"]] == [
        (2, True, "passed"),
        (1, False, ""),
    ]
    assert (seen["last_refresh"]["rows"], seen["service"]) == ("1–100", None)
    assert (seen["log"]["total"], seen["log"]["cursor"]) == (100, 100)
    told = redraft(settings, "diff", "1", "2")
    for difference in ("window_last_seq", "2.1111", "gate"):
        assert difference in told
    redraft(settings, "report")
    page = (settings.home / "report.html").read_text()
    assert "random-llama-0" in page
    assert "tiny-0b07ba0528e4" in page


def test_what_it_was_is_copied_before_it_is_upgraded(settings: Settings) -> None:
    before = contents(settings)
    with sqlite3.connect(settings.querylog) as log:
        [schema] = log.execute("PRAGMA user_version").fetchone()
        log.execute("PRAGMA journal_mode = DELETE")
    log.close()
    open_home(settings)
    QueryLog(settings.querylog).stats()
    copies = settings.home / "backups"
    assert {file.name: file.read_bytes() for file in (copies / "format-1").iterdir()} == before
    with sqlite3.connect(copies / f"queries-schema-{schema}.db") as kept:
        assert kept.execute("SELECT count(*) FROM rows").fetchone() == (100,)
        assert kept.execute("PRAGMA user_version").fetchone() == (schema,)
    kept.close()
    assert [path for path in copies.rglob("*") if path.stat().st_mode & 0o077] == []
    open_home(settings)
    assert {path.name for path in copies.iterdir()} == {"format-1", f"queries-schema-{schema}.db"}


def test_its_query_log_and_its_champions_are_read(settings: Settings) -> None:
    open_home(settings)
    assert len(QueryLog(settings.querylog).rows(1, 100)) == 100
    registry = open_registry(settings)
    champions = registry.champion("draft"), registry.champion("target")
    draft, target = (registry.download(one, settings.cache) for one in champions if one is not None)
    assert family_of(draft) is family_named("eagle3")
    assert open_draft(draft, target).taps


def test_opening_it_again_changes_nothing(settings: Settings) -> None:
    open_home(settings)
    once = contents(settings)
    open_home(settings)
    assert contents(settings) == once
    assert config_path(settings).stat().st_mode & 0o777 == 0o600


def test_a_kill_between_steps_does_no_harm(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def killed(_: Settings) -> None:
        done.append("killed")
        raise KeyboardInterrupt

    first = home.STEPS[0]
    first(settings)  # killed before the number moved
    assert not (settings.home / FORMAT_FILE).exists()
    others = home.STEPS[1:]
    monkeypatch.setattr(home, "STEPS", (first, killed))
    with pytest.raises(KeyboardInterrupt):
        open_home(settings)
    assert format_of(settings) == 2
    monkeypatch.setattr(home, "STEPS", (killed, lambda _: done.append("second")))
    open_home(settings)  # what was done is not done again
    assert (format_of(settings), done) == (3, ["killed", "second"])
    for step in others:
        step(settings)
    assert json.loads(config_path(settings).read_text())["follow_drafts"]


def test_a_new_home_is_of_the_latest_format(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "new" / "home")
    open_home(settings)
    assert format_of(settings) == latest_format()


def test_a_home_is_closed_to_other_users_and_one_that_was_open_is_mended(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    umask = os.umask(0o022)
    outside = tmp_path / "outside"
    outside.touch(mode=0o644)
    (settings.home / "logs").mkdir(parents=True, mode=0o777)
    (settings.home / "queries.db").touch(mode=0o644)
    (settings.home / "logs" / "run.sh").touch(mode=0o755)
    (settings.home / "link").symlink_to(outside)
    try:
        open_home(settings)
        (settings.home / "later").touch()
    finally:
        os.umask(umask)
    modes = {path.name: path.lstat().st_mode & 0o777 for path in (settings.home, *settings.home.rglob("*"))}
    assert modes.pop("link") == 0o777  # of a link it means nothing
    assert modes.pop("run.sh") == modes.pop("logs") == modes.pop("home") == 0o700
    assert set(modes.values()) == {0o600}
    assert outside.stat().st_mode & 0o777 == 0o644


def test_a_newer_home_is_refused_and_left_as_it_is(settings: Settings) -> None:
    (settings.home / FORMAT_FILE).write_text(json.dumps({"format": latest_format() + 1}))
    before = contents(settings)
    with pytest.raises(
        ValueError, match=r"is of format \d+, and this version of redraft knows up to \d+: upgrade redraft"
    ):
        open_home(settings)
    assert contents(settings) == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 0}', '{"format": "2"}'])
def test_a_damaged_number_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FORMAT_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"home\.json"):
        open_home(Settings(home=tmp_path))
