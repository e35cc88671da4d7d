import threading
import time
from pathlib import Path

import pytest

from infra.logs import follow_logs, last_lines


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
