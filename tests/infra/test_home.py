"""A home is closed to other users, and one of another format is refused as it is."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from infra.home import FORMAT, FORMAT_FILE, close_to_others, open_home
from infra.settings import Settings


def contents(settings: Settings) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(settings.home.iterdir())}


def test_a_new_home_is_of_the_format_that_is_read_and_opening_it_again_changes_nothing(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "new" / "home")
    open_home(settings)
    assert json.loads((settings.home / FORMAT_FILE).read_text()) == {"format": FORMAT}
    once = contents(settings)
    open_home(settings)
    assert contents(settings) == once


def test_a_home_is_closed_to_other_users_and_one_that_was_open_is_mended(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    umask = os.umask(0o022)
    outside = tmp_path / "outside"
    outside.touch(mode=0o644)
    (settings.home / "logs").mkdir(parents=True, mode=0o777)
    (settings.home / "mlflow.db").touch(mode=0o644)
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


def test_a_folder_that_is_not_there_yet_has_nothing_to_close(tmp_path: Path) -> None:
    close_to_others(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *((f'{{"format": {number}}}', number) for number in (str(FORMAT - 1), str(FORMAT + 1), '"2"')),
        *((content, FORMAT_FILE) for content in ("", "[]", "{}")),
    ],
)
def test_a_home_of_another_or_no_format_is_refused_in_one_line_and_left_as_it_is(tmp_path, content, told) -> None:
    settings = Settings(home=tmp_path)
    (settings.home / FORMAT_FILE).write_text(content)
    before = contents(settings)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        open_home(settings)
    assert str(settings.home) in str(refused.value)
    assert told.replace('"', "'") in str(refused.value)
    assert contents(settings) == before


def test_a_home_without_a_number_is_refused_by_its_log(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir()
    with closing(sqlite3.connect(settings.querylog)) as db:
        db.execute("PRAGMA user_version = 1")
    with pytest.raises(ValueError, match=r"has schema version 1, .*run: redraft build$"):
        open_home(settings)
    assert not (settings.home / FORMAT_FILE).exists()
