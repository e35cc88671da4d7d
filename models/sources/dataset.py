"""Prompts and documents from a data set: an id on the Hugging Face hub, a folder that `datasets` can read, or one file.

Rows are read as an import reads them (`models.conversations`), and one that can't be used is left out: the log says how
many for which reason, and where the first was. A file (JSON Lines, JSON, CSV, Parquet, packed or not) is read here,
without a hub and a cache; of anything else the whole split is fetched and cached, and `split = "train[:2000]"` keeps a
part of it. Data sets that need their own code to be run are refused by `datasets` itself.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from models.conversations import document_from_row, prompt_from_row
from models.params import BaseParams, LocalPath, did_you_mean
from models.rowfiles import WRONG, OnFault, Row, Unusable, holds_rows, read_rows, usable, without_nulls
from models.sources import Document, ItemT, Prompt


class Params(BaseParams):
    """Which data set, and how its rows are read.

    Attributes:
        path: id on the hub, folder or file.
        subset: one of a hub data set's configurations.
        split: of a hub data set or folder; a file has none.
        column: holds a chat, or a text: one user message of a prompt, the whole of a document. Rows without the default
            one may be of another form that an import reads.
        domain: of all items; a recipe's table names it, and elsewhere "" reads each row's column `domain`.
        only: of the rows whose column `domain` names one, those of this domain are read; "" reads all. A recipe's table
            reads its own unless it sets `domain`.
        group_column: rows with one value stay on one side of a split; "" makes each row its own group.
        count: of different items to take, from the start; None for all.
    """

    name: Literal["dataset"] = "dataset"
    path: LocalPath = Field(min_length=1)
    subset: str = ""
    split: str = Field("train", min_length=1)
    column: str = "messages"
    domain: str = ""
    only: str = ""
    group_column: str = ""
    count: int | None = Field(None, ge=1)


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a row in the data set's order, without exact copies; ValueError if there is no such data set or
    split, the hub can't be reached, or no row can be used; names the first of each reason."""
    return _different(params, prompt_from_row)


def documents(params: Params) -> list[Document]:
    """Return one document a row in the data set's order, without exact copies; an assistant's last answer is kept.
    ValueError as `prompts`."""
    return _different(params, document_from_row)


def _different(params: Params, make: Callable[[dict[str, Any], str, str, str], ItemT]) -> list[ItemT]:
    def item(place: str, row: dict[str, Any]) -> ItemT:
        return make(row, params.column, params.domain, _group(row, place, params))

    found: dict[str, ItemT] = {}
    for one in usable(params.path, lambda on_fault: _own(_rows(params, on_fault), params), item):
        found.setdefault(one.id, one)
        if len(found) == params.count:
            break
    return list(found.values())


def _own(rows: Iterator[tuple[str, Row]], params: Params) -> Iterator[tuple[str, Row]]:
    num_read, others = 0, set[str]()
    for place, row in rows:
        if params.only and (named := row.get("domain")) not in (None, "", params.only):
            others.add(str(named))
            continue
        num_read += 1
        yield place, row
    if others and not num_read:
        near, hint = did_you_mean(params.only, others), 'key "only" of a source names one, "domain" takes all rows'
        raise ValueError(f'{params.path}: no row is of domain "{params.only}"{near}; {hint}')


def _group(row: dict[str, Any], place: str, params: Params) -> str:
    name = Path(params.path).name
    if not params.group_column:
        return f"{name}:{place}"
    if params.group_column not in row:
        raise Unusable(WRONG, f'no column "{params.group_column}"; there are: {", ".join(row)}')
    if row[params.group_column] in (None, ""):
        raise Unusable("without a group", f'column "{params.group_column}" names no group')
    return f"{name}:{row[params.group_column]}"


def _rows(params: Params, on_fault: OnFault) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(params.path)
    if not path.is_file() and not holds_rows(path):
        return _set_rows(params)
    if params.split != "train" or params.subset:
        raise ValueError(f"{path} is a file, which has no splits and subsets; got {params.split!r}, {params.subset!r}")
    return read_rows(path, on_fault)


def _set_rows(params: Params) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # takes seconds to load, and most runs don't need it

    try:
        rows = datasets.load_dataset(params.path, params.subset or None, split=params.split)
    except (ConnectionError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f'data set "{params.path}" is neither on a hub in reach (none is asked unless REDRAFT_HUB=true), nor '
            f"cached, nor a folder or file ({error})"
        ) from error
    return ((f"row {number}", without_nulls(row)) for number, row in enumerate(rows, start=1))
