"""Rows of local files, one at a time: JSON Lines, Parquet, CSV. A file of any size costs the memory of one batch."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".jsonl", ".parquet", ".csv")
BATCH_ROWS = 512
# Longest field of a CSV file; the module's own limit is less than a long conversation.
MAX_FIELD_CHARS = 1 << 26

Row = dict[str, Any]
# Told of a row that can't be read: its place ("line 3") and what was wanted.
OnFault = Callable[[str, str], None]


def read_rows(path: Path, on_fault: OnFault | None = None) -> Iterator[tuple[str, Row]]:
    """Yield each row's place in the file, "line 3" or "row 3", and the row.

    Args:
        path: ends in .jsonl, .parquet or .csv.
        on_fault: called for each row that can't be read, and reading goes on; without it the first one ends the
            reading.

    Raises:
        ValueError: the file is missing or of another kind, or a row can't be read; names the place.
    """
    _require_readable(path)
    readers = dict(zip(SUFFIXES, (_jsonl_rows, _parquet_rows, _csv_rows), strict=True))

    def refuse(place: str, fault: str) -> NoReturn:
        raise ValueError(f"{path}, {place}: {fault}")

    return readers[path.suffix](path, on_fault or refuse)


def count_rows(path: Path) -> int:
    """Return how many rows a file has: exact for Parquet, its lines for the others.

    Raises:
        ValueError: as `read_rows`.
    """
    _require_readable(path)
    if path.suffix == ".parquet":
        with _parquet_file(path) as file:
            return int(file.metadata.num_rows)
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def _require_readable(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: wanted a file ending in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")


@contextmanager
def _parquet_file(path: Path) -> Iterator["ParquetFile"]:
    import pyarrow  # slow to load, and most runs read no Parquet
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error


def _jsonl_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
                on_fault(f"line {number}", f"not JSON ({error})")
                continue
            if not isinstance(row, dict):
                on_fault(f"line {number}", f"wanted an object, got {type(row).__name__}")
                continue
            yield f"line {number}", row


def _parquet_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    number = 0
    with _parquet_file(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def _csv_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        while True:
            try:
                row = next(reader)
                json.dumps(row, ensure_ascii=False).encode()
            except StopIteration:
                return
            except csv.Error as error:  # the next line may be a row again
                on_fault(f"after line {reader.line_num}", f"not CSV in UTF-8 ({error})")
                continue
            except UnicodeEncodeError as error:
                on_fault(f"line {reader.line_num}", f"not CSV in UTF-8 ({error})")
                continue
            if None in row or None in row.values():
                wanted = len(reader.fieldnames or ())
                on_fault(f"line {reader.line_num}", f"wanted {wanted} fields, as the first line has")
                continue
            yield f"line {reader.line_num}", dict(row)
