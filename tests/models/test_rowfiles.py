"""Rows of JSON Lines, JSON, CSV and Parquet, packed or not, and the place of each that can't be read."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from models.rowfiles import BATCH_ROWS, Unusable, count_rows, read_rows, usable

KINDS = ("jsonl", "json", "csv", "parquet")


def pack(path: Path) -> None:
    """Write a file again as `.gz` and as `.zst`."""
    content = path.read_bytes()
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    path.with_name(f"{path.name}.zst").write_bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def test_all_kinds_give_the_same_rows_packed_or_not(tmp_path: Path) -> None:
    rows = [{"text": f'line {i},\n"quoted"', "user": "é"} for i in range(BATCH_ROWS + 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    quoted = ['"' + row["text"].replace('"', '""') + '",' + row["user"] + "\r\n" for row in rows]
    (tmp_path / "rows.csv").write_text("﻿text,user\r\n" + "".join(quoted), newline="")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for kind in KINDS:
        pack(tmp_path / f"rows.{kind}")
        for name in (f"rows.{kind}", f"rows.{kind}.gz", f"rows.{kind}.zst"):
            assert [row for _, row in read_rows(tmp_path / name)] == rows, name
            assert count_rows(tmp_path / name) == (len(rows) if kind != "csv" else 2 * len(rows) + 1), name


@pytest.mark.parametrize(
    ("content", "places"),
    [
        ('[{"a": 1}, {"a": 2}]', [1, 1]),
        ('[\n  {\n    "a": 1\n  },\n  {"a": 2}\n]\n', [2, 5]),
        ('{"a": 1}\n\n{"a": 2}\n', [1, 3]),
        ('{"a": 1} {"a": 2}', [1, 1]),
        ('[{"a": 1},\n{"a": 2}', [1, 2]),
    ],
)
def test_objects_of_a_json_file_have_their_lines(tmp_path: Path, content: str, places: list[int]) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert list(read_rows(path)) == [(f"line {at}", {"a": number}) for number, at in enumerate(places, start=1)]


def test_brackets_and_commas_in_texts_part_no_objects_and_blank_lines_count_as_lines(tmp_path: Path) -> None:
    rows = [{"a": '}], "{[\\"', "b": [["\n"]]}, {"a": "\u2028é"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    assert [row for _, row in read_rows(path)] == rows
    path = path.with_suffix(".jsonl")
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(path)) == [("line 2", {"a": 1}), ("line 4", {"a": 2})]


def test_keys_that_hold_nothing_in_a_table_are_not_there(tmp_path: Path) -> None:
    rows = [{"calls": [{"x": 1}, {"y": [{"z": 2}]}]}, {"other": "a"}]
    inner = pyarrow.struct([("z", pyarrow.int64()), ("w", pyarrow.string())])
    call = pyarrow.struct([("x", pyarrow.int64()), ("y", pyarrow.list_(inner))])
    schema = pyarrow.schema([("calls", pyarrow.list_(call)), ("other", pyarrow.string())])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    assert [row for _, row in read_rows(tmp_path / "a.parquet")] == rows


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_file_that_breaks_off_gives_what_came_before(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"a": number, "b": f"{number:x}" * 9}) + "\n" for number in range(20_000)))
    pack(path)
    cut = path.with_name(f"a.jsonl.{kind}")
    cut.write_bytes(cut.read_bytes()[:-1000])
    told: list[tuple[str, str]] = []
    rows = list(read_rows(cut, lambda *fault: told.append(fault)))
    assert len(rows) > 1000
    assert told[0][0] == f"after line {len(rows)}"
    assert told[0][1].startswith("the file is broken off or damaged")
    with pytest.raises(ValueError, match=f"a.jsonl.{kind}, after line"):
        list(read_rows(cut))


def rows_of(*rows: Any) -> Any:
    return lambda on_fault: [(f"line {number}", row) for number, row in enumerate(rows, start=1)]


def positive(place: str, row: dict[str, Any]) -> int:
    if row["a"] <= 0:
        raise Unusable("not above 0", f"got {row['a']}")
    return int(row["a"])


def test_rows_that_cannot_be_used_are_counted_with_their_first_places(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = list(usable("f", rows_of({"a": 1}, {"a": 0}, {"a": "x"}, {"a": -1}, {"a": 2}), positive))
    assert found == [1, 2]
    (line,) = caplog.messages
    assert line == (
        "f: skipped 2 not above 0, 1 with wrong fields; the first: f, line 2: got 0; "
        "f, line 3: TypeError: '<=' not supported between instances of 'str' and 'int'"
    )


def test_where_no_row_can_be_used_the_first_fault_is_raised() -> None:
    with pytest.raises(ValueError, match="no row can be used: 2 not above 0; f, line 1: got 0"):
        list(usable("f", rows_of({"a": 0}, {"a": -1}), positive))
    with pytest.raises(ValueError, match="f: holds no rows"):
        list(usable("f", rows_of(), positive))


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', "line 2", "not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 2}\n', "line 2", "not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n{"a": 2}\n', "line 2", "wanted an object, got list"),
        ("a.json", b'[{"a": 1},\n{"a": \n{"a": 2}]\n', "line 2", "not JSON"),
        ("a.json", b'[{"a": 1},\n{"a": [},\n{"a": 2}]\n', "line 2", "not JSON"),
        ("a.json", b'[\n {"a": 1},\n {"a": "x},\n {"a": 2}]\n', "line 3", "not JSON"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}, {"a": 2}]\n', "line 2", "not JSON"),
        ("a.json", b'[{"a": 1},\n2, {"a": 2}]\n', "line 2", "wanted an object, got int"),
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


KIND = r"wanted a file ending in \.jsonl, \.json, \.csv, \.parquet, or that and \.gz or \.zst"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("a.parquet", "not a Parquet file"), ("a.txt", KIND), ("a.txt.gz", KIND)),
        *((f"absent.{kind}", "no such file") for kind in ("jsonl", "parquet", "csv")),
    ],
)
def test_a_file_of_another_kind_and_a_missing_one_are_refused(tmp_path: Path, name: str, fault: str) -> None:
    for present in ("a.parquet", "a.txt", "a.txt.gz"):
        (tmp_path / present).write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=fault):
        list(read_rows(tmp_path / name, lambda *_: None))
