"""Prompts and documents from a data set: an id on the Hugging Face hub, a folder that `datasets` can read, or one file.

Nothing is guessed: the column and, where rows don't carry it, the domain are named in the recipe. One wrong row fails
the whole stream, with its place, rather than shrink the data unseen. A file (JSON Lines, Parquet, CSV) is read here,
without a hub and a cache; of anything else the whole split is fetched and cached, and `split = "train[:2000]"` keeps a
part of it. Data sets that need their own code to be run are refused by `datasets` itself.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from models.params import BaseParams
from models.rowfiles import SUFFIXES, read_rows
from models.sources import Document, ItemT, Prompt, document_from_row, prompt_from_row


class Params(BaseParams):
    """Which data set, and how its rows are read.

    Attributes:
        path: id on the hub, folder or file.
        subset: one of a hub data set's configurations.
        split: of a hub data set or folder; a file has none.
        column: holds a chat in OpenAI's shape, or a text: one user message of a prompt, the whole of a document.
        domain: of all items; "" reads each row's column `domain`.
        group_column: rows with one value stay on one side of a split; "" makes each row its own group.
        count: of different items to take, from the start; None for all.
    """

    name: Literal["dataset"] = "dataset"
    path: str = Field(min_length=1)
    subset: str = ""
    split: str = Field("train", min_length=1)
    column: str = "messages"
    domain: str = ""
    group_column: str = ""
    count: int | None = Field(None, ge=1)


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a row in the data set's order, without exact copies.

    Raises:
        ValueError: there is no such data set, split or column, the hub can't be reached, or a row is wrong; names place
        and column.
    """
    return _different(params, prompt_from_row)


def documents(params: Params) -> list[Document]:
    """Return one document a row in the data set's order, without exact copies; an assistant's last answer is kept.

    Raises:
        ValueError: as `prompts`.
    """
    return _different(params, document_from_row)


def _different(params: Params, make: Callable[[dict[str, Any], str, str, str, str], ItemT]) -> list[ItemT]:
    found: dict[str, ItemT] = {}
    for place, row in _rows(params):
        where = f"{params.path}, {place}"
        item = make(row, params.column, params.domain, _group(row, place, where, params), where)
        found.setdefault(item.id, item)
        if len(found) == params.count:
            break
    if not found:
        raise ValueError(f"{params.path}: holds no rows")
    return list(found.values())


def _group(row: dict[str, Any], place: str, where: str, params: Params) -> str:
    name = Path(params.path).name
    if not params.group_column:
        return f"{name}:{place}"
    if params.group_column not in row:
        raise ValueError(f'{where}: no column "{params.group_column}"; there are: {", ".join(row)}')
    if row[params.group_column] in (None, ""):
        raise ValueError(f'{where}: column "{params.group_column}" names no group')
    return f"{name}:{row[params.group_column]}"


def _rows(params: Params) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(params.path)
    if not path.is_file() and path.suffix not in SUFFIXES:
        return _set_rows(params)
    if params.split != "train" or params.subset:
        raise ValueError(f"{path} is a file, which has no splits and subsets; got {params.split!r}, {params.subset!r}")
    return read_rows(path)


def _set_rows(params: Params) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # takes seconds to load, and most runs don't need it

    try:
        rows = datasets.load_dataset(params.path, params.subset or None, split=params.split)
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f'data set "{params.path}" is neither on a hub in reach, nor cached, nor a folder or file ({error})'
        ) from error
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))
