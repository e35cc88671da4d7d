"""Locks between processes, shared and exclusive."""

import threading
import time
from pathlib import Path

import pytest

from infra.locks import lock_file, lock_folder
from tests.infra.rows import running_python


@pytest.mark.parametrize(
    ("held", "wanted", "gets_it"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_only_shared_locks_are_held_at_the_same_time(tmp_path: Path, held: bool, wanted: bool, gets_it: bool) -> None:
    file = tmp_path / "lock"
    with lock_file(file, shared=held) as first, lock_file(file, shared=wanted, wait_s=0) as second:
        assert (first, second) == (True, gets_it)
    with lock_file(file, wait_s=0) as after:
        assert after
    assert file.stat().st_mode & 0o777 == 0o600


def test_whoever_waits_gets_the_lock_when_it_is_free_and_gives_up_in_time(tmp_path: Path) -> None:
    file, order = tmp_path / "lock", list[str]()

    def wait() -> None:
        with lock_file(file) as is_held:
            order.append(f"waited {is_held}")

    with lock_file(file):
        thread = threading.Thread(target=wait)
        thread.start()
        began_s = time.monotonic()
        with lock_file(file, wait_s=0.2) as is_held:
            assert not is_held
        assert time.monotonic() - began_s >= 0.2
        order.append("held")
    thread.join()
    assert order == ["held", "waited True"]


def test_a_folder_is_locked_without_a_file_in_it_and_is_never_made(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(FileNotFoundError), lock_folder(folder):
        pass
    folder.mkdir()
    with lock_folder(folder) as first, lock_folder(folder, wait_s=0) as second:
        assert (first, second) == (True, False)
    assert not list(folder.iterdir())


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from infra.locks import lock_file\n"
        "with lock_file(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with running_python(script, tmp_path / "lock") as (_, told):
        assert told == "held"
        with lock_file(tmp_path / "lock", wait_s=0) as is_held:
            assert not is_held
    with lock_file(tmp_path / "lock", wait_s=30) as is_held:
        assert is_held
