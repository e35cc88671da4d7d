"""A home is closed to other users, and one of another format is refused as it is."""

import json
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from infra.home import (
    FORMAT,
    FORMAT_FILE,
    SPLIT_KEY,
    close_to_others,
    front_folder,
    home_secret,
    is_served,
    open_home,
    ray_folder,
    served_by,
)
from infra.settings import Settings, is_plain
from tests.conftest import ODD_NAME
from tests.infra.rows import run_python, running_python


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


def test_a_home_has_one_secret_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    home, other = tmp_path / "one", tmp_path / "other"
    assert home_secret(home) == home_secret(home) != home_secret(other)
    assert (home / SPLIT_KEY).stat().st_mode & 0o777 == 0o600
    assert [file.name for file in home.iterdir()] == [SPLIT_KEY]
    assert home_secret(home, "another.key") == home_secret(home, "another.key") != home_secret(home)


def test_processes_that_come_at_the_same_time_get_the_same_one(tmp_path: Path) -> None:
    script = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path\n"
        "from infra.home import home_secret\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    print(len(set(pool.map(lambda _: home_secret(Path(sys.argv[1])), range(64)))))"
    )
    assert run_python(script, tmp_path).stdout == "1\n"


def test_a_removed_secret_is_made_anew_and_a_torn_or_open_one_is_refused(tmp_path: Path) -> None:
    first = home_secret(tmp_path)
    file = tmp_path / SPLIT_KEY
    file.unlink()
    assert home_secret(tmp_path) != first
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"others may read .*split\.key; remove it"):
        home_secret(tmp_path)
    file.write_bytes(first[:7])
    with pytest.raises(ValueError, match=r"split\.key holds 7 bytes, wanted 32; remove it, and a new one is made"):
        home_secret(tmp_path)


@pytest.mark.slow
def test_f39_a_service_that_was_killed_holds_its_home_no_more(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from infra.home import serving\n"
    code += "with serving(Path(sys.argv[1]), 'http://gone'): print('serving', flush=True); time.sleep(60)"
    with running_python(code, tmp_path) as (_, told):
        assert told == "serving"
        assert is_served(tmp_path)
        assert "at http://gone" in served_by(tmp_path)
    assert not is_served(tmp_path)


def test_the_fronts_folder_is_for_nobody_else_and_its_sockets_path_is_never_too_long(tmp_path: Path) -> None:
    folders = [front_folder(tmp_path / (letter * 100)) for letter in "ab"] + [front_folder(Path("/", ODD_NAME))]
    with tempfile.TemporaryDirectory() as home:
        assert front_folder(Path(home)) == Path(home, "front")
    assert folders[0] != folders[1]
    assert ray_folder(Path("/", ODD_NAME)) == ray_folder(tmp_path / ("a" * 100))
    for folder in folders:
        assert is_plain(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(folder / "replica.sock.1234567")) < 108
        folder.rmdir()
