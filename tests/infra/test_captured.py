import os
import time
from pathlib import Path

from infra.captured import CapturedFiles


def files_of(tmp_path: Path, ages_s: dict[str, float]) -> CapturedFiles:
    files = CapturedFiles(tmp_path / "queries.db")
    files.make()
    for row_id, age_s in ages_s.items():
        files.path_of(row_id).write_bytes(b"12345")
        os.utime(files.path_of(row_id), (time.time() - age_s,) * 2)
    return files


def test_nothing_is_there_before_anything_is_captured(tmp_path: Path) -> None:
    files = CapturedFiles(tmp_path / "queries.db")
    assert (files.num_bytes(), files.forget(["a"]), files.forget_older_than(0)) == (0, 0, 0)
    assert not files.folder.exists()


def test_the_folder_is_closed_and_a_rows_file_goes_by_its_id(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"a/../b": 0, "c": 0})
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert files.num_bytes() == 10
    assert files.forget(["a/../b", "unknown"]) == 1
    assert list(files.folder.iterdir()) == [files.path_of("c")]


def test_files_go_by_age(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"old": 3 * 24 * 3600, "new": 3600})
    assert files.forget_older_than(2) == 1
    assert list(files.folder.iterdir()) == [files.path_of("new")]


def test_files_without_a_row_go_once_the_row_would_be_there(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"logged": 90, "unlogged": 90, "on its way": 1})
    torn = files.folder / ".torn.states.17"
    torn.write_bytes(b"1")
    os.utime(torn, (1, 1))
    assert files.forget_others(["logged"], older_than_s=60) == 2
    assert {*files.folder.iterdir()} == {files.path_of("logged"), files.path_of("on its way")}
