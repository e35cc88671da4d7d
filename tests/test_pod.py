"""What works in a pod: a volume that is another user's, no account and no HOME, and a root that nobody writes to."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pod import GROUP, HOME, USER, argv_in_pod, volume

REDRAFT = (sys.executable, "-W", "ignore", "-m", "flows.cli")


def in_pod(command: tuple[str, ...], on: Path, **environment: str) -> list[str]:
    """Return how a command is run in a pod whose home is a volume."""
    root = on.with_name("root")
    root.mkdir(exist_ok=True)
    return argv_in_pod(command, on, root, **environment)


def run(command: tuple[str, ...], on: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(in_pod(command, on, **environment), capture_output=True, text=True, check=False)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.slow
def test_a_volumes_root_that_a_group_may_enter_is_a_home_and_what_lies_in_it_is_closed(tmp_path: Path) -> None:
    home = volume(tmp_path / "volume")
    (home / "lost+found").mkdir()
    (home / "lost+found").chmod(0o2770)
    (home / "split.key").write_bytes(bytes(32))
    (home / "split.key").chmod(0o660)  # as each mount leaves it where a volume's files are given to a group
    os.chown(home / "split.key", USER, GROUP)
    done = run((*REDRAFT, "status"), home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no drafts yet" in done.stdout
    modes = {path.name: mode_of(path) for path in home.iterdir()}
    assert (mode_of(home), modes.pop("lost+found")) == (0o2775, 0o2770)
    assert {"home.json", "queries.db", "split.key"} < modes.keys()
    assert {mode & 0o077 for mode in modes.values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "inner"), [(0o2777, ""), (0o2775, "inner")])
def test_a_folder_that_all_may_write_or_that_is_no_volume_is_refused_with_what_to_set(
    tmp_path: Path, mode: int, inner: str
) -> None:
    home = volume(tmp_path / "volume")
    if inner:
        volume(home / inner)
    (home / inner).chmod(mode)
    done = run((*REDRAFT, "status"), home, REDRAFT_HOME=str(HOME / inner))
    told = f"redraft: other users may read {HOME / inner}, and only its owner can change that"
    assert (done.returncode, done.stderr) == (2, f"{told}; set REDRAFT_HOME to a new folder in it\n")


@pytest.mark.slow
@pytest.mark.parametrize("told", [{}, {"HOME": "/"}], ids=["no HOME", "HOME of nobody"])
def test_libraries_find_a_folder_and_a_name_where_the_user_has_no_account(tmp_path: Path, told: dict[str, str]) -> None:
    code = """
from infra.settings import load_settings
load_settings().prepare_environment()
import getpass, pathlib, prefect.settings
print(pathlib.Path.home(), getpass.getuser())
"""
    done = run((sys.executable, "-c", code), volume(tmp_path / "volume"), **told)
    assert (done.returncode, done.stdout) == (0, f"{HOME}/cache/user {USER}\n"), done.stderr


@pytest.mark.slow
def test_who_would_lower_its_session_goes_on_where_nobody_may(tmp_path: Path) -> None:
    code = "from infra.priority import lower_session; print(lower_session())"
    done = run(("/usr/bin/setsid", sys.executable, "-c", code), volume(tmp_path / "volume"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
