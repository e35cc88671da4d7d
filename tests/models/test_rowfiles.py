"""Rows of JSON Lines, Parquet and CSV, and the place of each that can't be read."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from models.rowfiles import BATCH_ROWS, read_rows


def test_the_three_kinds_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"text": f'line {i},\n"quoted"', "user": "é"} for i in range(BATCH_ROWS + 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    quoted = ['"' + row["text"].replace('"', '""') + '",' + row["user"] + "\r\n" for row in rows]
    (tmp_path / "rows.csv").write_text("﻿text,user\r\n" + "".join(quoted), newline="")
    for kind in ("jsonl", "parquet", "csv"):
        assert [row for _, row in read_rows(tmp_path / f"rows.{kind}")] == rows, kind


def test_blank_lines_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(tmp_path / "rows.jsonl")) == [("line 2", {"a": 1}), ("line 4", {"a": 2})]


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', "line 2", "not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 2}\n', "line 2", "not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n{"a": 2}\n', "line 2", "wanted an object, got list"),
        ("a.csv", b"a,b\n1,2\n3\n4,5\n", "line 3", "wanted 2 fields"),
        ("a.csv", b"a,b\n1,2\n3,4,5\n4,5\n", "line 3", "wanted 2 fields"),
        ("a.csv", b"a,b\n1,2\n3,\xff\n4,5\n", "line 3", "not CSV in UTF-8"),
        ("a.csv", b'a,b\n1,2\n3,"4"5\n4,5\n', "after line 2", "not CSV in UTF-8"),
        ("a.csv", b'a,b\n1,2\n4,5\n3,"4\n', "after line 3", "not CSV in UTF-8"),
    ],
)
def test_a_row_that_cannot_be_read_ends_the_reading_or_is_told_of(
    tmp_path: Path, name: str, content: bytes, place: str, fault: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}, {place}: {fault}"):
        list(read_rows(path))
    told: list[tuple[str, str]] = []
    assert len(list(read_rows(path, lambda *fault: told.append(fault)))) == 2
    assert [at for at, _ in told] == [place]
    assert told[0][1].startswith(fault)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.parquet", b"PAR1 but no more", "not a Parquet file"),
        ("a.txt", b"", r"wanted a file ending in \.jsonl, \.parquet, \.csv"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        list(read_rows(path, lambda *_: None))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent.csv"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_rows(tmp_path / name)
