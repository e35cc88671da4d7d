"""Prompts from a local file, JSON Lines or Parquet.

Nothing is guessed: the column and, where rows don't carry it, the domain are named in the recipe. One wrong row fails
the whole file, with its line, rather than shrink the data unseen.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from models.params import BaseParams
from models.sources import Prompt, prompt_from_row, unique


class Params(BaseParams):
    """Where the rows are and how they are read."""

    name: Literal["file"] = "file"
    path: Path
    column: str = "messages"
    domain: str = ""
    group_column: str = ""


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a row, without exact copies.

    `column` holds a chat in OpenAI's shape or a plain text; `domain` "" reads each row's column `domain`;
    `group_column` "" makes each row its own group.

    Raises:
        ValueError: the file is missing, of another kind, empty or holds a wrong row; names line and field.
    """
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if params.path.suffix not in readers:
        raise ValueError(f"{params.path}: wanted a file ending in {' or '.join(readers)}")
    if not params.path.is_file():
        raise ValueError(f"{params.path}: no such file")
    found = [_prompt(row, place, params) for place, row in readers[params.path.suffix](params.path)]
    if not found:
        raise ValueError(f"{params.path}: holds no rows")
    return unique(found)


def _prompt(row: dict[str, Any], place: str, params: Params) -> Prompt:
    group = f"{params.path.name}:{place}"
    if params.group_column:
        if not row.get(params.group_column):
            raise ValueError(f'{params.path}, {place}: column "{params.group_column}" names no group')
        group = f"{params.path.name}:{row[params.group_column]}"
    return prompt_from_row(row, params.column, params.domain, group, f"{params.path}, {place}")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: wanted an object, got {type(row).__name__}")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow  # slow to load, and most runs read no Parquet
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
