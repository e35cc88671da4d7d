"""Rows of local files, one at a time: JSON Lines, JSON, CSV, Parquet, and each of them in `.gz` or `.zst`.

A file of any size costs the memory of one batch, but for JSON, of which the whole text is held. A row's place is its
line; of Parquet, which has none, its number.
"""

import csv
import gzip
import io
import json
import logging
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PACKED = (".gz", ".zst")
BATCH_ROWS = 512
# Longest field of a CSV file; the module's own limit is less than a long conversation.
MAX_FIELD_CHARS = 1 << 26
BROKEN = (EOFError, OSError, zlib.error)  # of what was packed
_DECODER = json.JSONDecoder()
_VALUE = re.compile(r"[^\s,]")

WRONG = "with wrong fields"
MAX_FAULT_CHARS = 300
# What a row fails with: `Unusable`, and what no check names.
FAULTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

Row = dict[str, Any]
RowT = TypeVar("RowT")
ItemT = TypeVar("ItemT")
# Told of a row that can't be read: its place ("line 3") and what was wanted.
OnFault = Callable[[str, str], None]

log = logging.getLogger(__name__)


class Unusable(ValueError):
    """A row that can't be used; `reason` is what it is counted under, the message says what was wanted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Skipped:
    """The rows that were left out: reason to number, and to place and fault of its first row."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, where: str, fault: Exception) -> None:
        """Count a row, by what it failed with."""
        reason = fault.reason if isinstance(fault, Unusable) else WRONG
        said = str(fault) if isinstance(fault, Unusable) else f"{type(fault).__name__}: {fault}"
        self.counts[reason] += 1
        self.first.setdefault(reason, f"{where}: {said[:MAX_FAULT_CHARS]}")

    def __str__(self) -> str:
        return ", ".join(f"{number} {reason}" for reason, number in sorted(self.counts.items()))


def holds_rows(path: Path) -> bool:
    """Return whether a file's name is one of those that are read here."""
    return path.name.endswith(tuple(kind + pack for kind in _READERS for pack in ("", *PACKED)))


def read_rows(path: Path, on_fault: OnFault | None = None) -> Iterator[tuple[str, Row]]:
    """Yield each row's place in the file, "line 3" or "row 3", and the row.

    A JSON file is a list of objects, or objects one after the other. `on_fault` is called for each row that can't be
    read, and reading goes on; without it the first one ends the reading. ValueError if the file is missing or of
    another kind, or a row can't be read; names the place.
    """
    _require_readable(path)

    def refuse(place: str, fault: str) -> NoReturn:
        raise ValueError(f"{path}, {place}: {fault}")

    return _rows(path, on_fault or refuse)


def _rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    place = "line 0"
    try:
        for place, row in _READERS[_kind(path)](path, on_fault):
            yield place, row
    except BROKEN as error:
        on_fault(f"after {place}", f"the file is broken off or damaged ({error})")


def usable(
    path: str, read: Callable[[OnFault], Iterable[tuple[str, RowT]]], make: Callable[[str, RowT], ItemT]
) -> Iterator[ItemT]:
    """Yield what is made of places and rows, and log how many were left out for which reason, with the first of each.

    `read` is given what is told of each row that can't be read. ValueError if there are no rows, or none can be used.
    """
    skipped, num_made = Skipped(), 0
    try:
        for place, row in read(lambda place, fault: skipped.add(f"{path}, {place}", Unusable("unreadable", fault))):
            try:
                item = make(place, row)
            except FAULTS as fault:
                skipped.add(f"{path}, {place}", fault)
                continue
            num_made += 1
            yield item
    finally:
        if skipped.counts and num_made:
            log.warning("%s: skipped %s; the first: %s", path, skipped, "; ".join(skipped.first.values()))
    if not num_made:
        first = f"no row can be used: {skipped}; {'; '.join(skipped.first.values())}"
        raise ValueError(first if skipped.counts else f"{path}: holds no rows")


def count_rows(path: Path) -> int:
    """Return how many rows a file has, exact for Parquet and JSON, else its lines; ValueError as `read_rows`."""
    _require_readable(path)
    try:
        if _kind(path) == ".parquet":
            with _parquet_file(path) as file:
                return int(file.metadata.num_rows)
        if _kind(path) == ".json":
            return sum(1 for _ in _elements(_text(path)))
        with _opened(path) as lines:
            return sum(1 for _ in lines)
    except BROKEN as error:
        raise ValueError(f"{path}: the file is broken off or damaged ({error})") from error


def _require_readable(path: Path) -> None:
    if not holds_rows(path):
        raise ValueError(f"{path}: wanted a file ending in {', '.join(_READERS)}, or that and {' or '.join(PACKED)}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path, "rb"))
    if path.suffix == ".zst":
        import pyarrow  # slow to load, and most runs read none

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


@contextmanager
def _parquet_file(path: Path) -> Iterator["ParquetFile"]:
    import pyarrow  # slow to load, and most runs read no Parquet
    from pyarrow import parquet

    with tempfile.TemporaryFile() as whole, _opened(path) as packed:
        if path.suffix in PACKED:  # its end is read first
            shutil.copyfileobj(packed, whole)
        try:
            with parquet.ParquetFile(whole if path.suffix in PACKED else packed) as file:
                yield file
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: not a Parquet file ({error})") from error


def _jsonl_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    with _opened(path) as lines:
        yield from _parsed(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), on_fault)


def _parsed(texts: Iterable[tuple[int, bytes]], on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    for number, text in texts:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
            on_fault(f"line {number}", f"not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield f"line {number}", row
        else:
            on_fault(f"line {number}", f"wanted an object, got {type(row).__name__}")


def _text(path: Path) -> str:
    with _opened(path) as file:
        return file.read().decode("utf-8-sig", "surrogateescape")


def _json_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    elements = _elements(_text(path))
    return _parsed(((number, text.encode(errors="surrogateescape")) for number, text in elements), on_fault)


def _elements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each element of a list, or of each value; a broken one is one of them."""
    position = len(text) - len(text.lstrip())
    is_list = text.startswith("[", position)
    position += is_list
    number, counted = 1, 0
    while (found := _VALUE.search(text, position)) and not (is_list and found[0] == "]"):
        begin = found.start()
        number, counted = number + text.count("\n", counted, begin), begin
        try:
            _, position = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):  # the next line that begins as this one does may be an element again
            indent = text[text.rfind("\n", 0, begin) + 1 : begin]
            again = text.find(f"\n{indent if indent.isspace() else ''}{text[begin]}", begin)
            position = len(text) if again < 0 else again
        yield number, text[begin:position]


def _parquet_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    with _parquet_file(path) as file:
        rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(BATCH_ROWS))
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", without_nulls(row)


def without_nulls(value: Any) -> Any:
    """Return a row of a table without the keys that hold nothing: there each object has the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _csv_rows(path: Path, on_fault: OnFault) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    with (
        _opened(path) as packed,
        io.TextIOWrapper(packed, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
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


_READERS: dict[str, Callable[[Path, OnFault], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
