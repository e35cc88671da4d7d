"""Files that others read meanwhile."""

import threading
import time
from pathlib import Path

import pytest

from infra.files import follow_logs, last_lines, replacing, write_atomic


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
    threads = [threading.Thread(target=write_atomic, args=(file, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() in contents
    assert list(tmp_path.iterdir()) == [file]


def test_the_last_lines_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("".join(f"line {number}\n" for number in range(50_000)))
    assert last_lines(file, 2) == ["line 49998", "line 49999"]
    (tmp_path / "empty.log").write_text("")
    assert last_lines(tmp_path / "empty.log", 5) == []


@pytest.mark.slow
def test_what_is_appended_is_followed_by_whole_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text("old\n")
    second.write_text("")
    got: list[tuple[str, str]] = []

    def follow() -> None:
        for file, line in follow_logs([first, second]):
            got.append((file.stem, line))
            if len(got) == 3:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for file, text in ((first, "x\nhalf"), (second, "y\n"), (first, " and half\n")):
        time.sleep(0.5)
        with file.open("a") as log:
            log.write(text)
    thread.join(60)
    assert got == [("a", "x"), ("b", "y"), ("a", "half and half")]
