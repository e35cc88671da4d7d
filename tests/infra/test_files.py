"""Files that others read meanwhile."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.files import follow_logs, last_lines, lock_file, lock_folder, replacing, write_atomic
from tests.infra.rows import running_python


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_atomic(file, "τ")
    write_atomic(file, "τ and more")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text(encoding="utf-8") == "τ and more"
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "\ud800")
    assert file.read_text(encoding="utf-8") == "τ and more"
    with pytest.raises(ValueError, match="there is no folder"):
        write_atomic(tmp_path / "none" / "page.html", "")
    with pytest.raises(ValueError, match="is a folder"):
        write_atomic(tmp_path, "")
    assert list(tmp_path.iterdir()) == [file]


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(file) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_threads_that_write_the_same_file_at_once_leave_one_of_their_contents(tmp_path: Path) -> None:
    file, contents = tmp_path / "file", [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(lambda content: write_atomic(file, content), contents))
    assert file.read_text() in contents
    assert list(tmp_path.iterdir()) == [file]


def test_the_last_lines_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("".join(f"line {number}\n" for number in range(50_000)))
    assert last_lines(file, 2) == ["line 49998", "line 49999"]
    (tmp_path / "empty.log").write_text("")
    assert last_lines(tmp_path / "empty.log", 5) == []


@pytest.mark.slow
def test_what_is_appended_is_followed_by_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("old\n")
    second.write_text("")
    got: list[tuple[str, str]] = []

    def follow() -> None:
        for file, line in follow_logs([first, second]):
            got.append((file.stem, line))
            if len(got) == 3:
                return

    monkeypatch.setattr("infra.files.LOG_POLL_S", 0.02)
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for file, text in ((first, "x\nhalf"), (second, "y\n"), (first, " and half\n")):
        time.sleep(0.2)
        with file.open("a") as log:
            log.write(text)
    thread.join(60)
    assert got == [("a", "x"), ("b", "y"), ("a", "half and half")]


@pytest.mark.parametrize(
    ("held", "wanted", "gets_it"), [(True, True, True), (True, False, False), (False, True, False)]
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
    script = "import sys, time; from pathlib import Path; from infra.files import lock_file\n"
    script += "with lock_file(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with running_python(script, tmp_path / "lock") as (_, told):
        assert told == "held"
        with lock_file(tmp_path / "lock", wait_s=0) as is_held:
            assert not is_held
    with lock_file(tmp_path / "lock", wait_s=30) as is_held:
        assert is_held
