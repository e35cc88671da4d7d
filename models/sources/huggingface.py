"""Prompts from a data set of the Hugging Face hub, or from a local folder that `datasets` can read.

The whole split is fetched and cached; `split = "train[:2000]"` keeps a part of it. Data sets that need their own code
to be run are refused by `datasets` itself.
"""

from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Prompt, prompt_from_row, unique


class Params(BaseParams):
    """Which data set, and how its rows are read."""

    name: Literal["huggingface"] = "huggingface"
    dataset: str = Field(min_length=1, description="id on the hub, or a folder")
    subset: str = ""
    split: str = "train"
    column: str = "messages"
    domain: str = ""


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt a row, without exact copies; each row is its own group.

    `column` holds a chat in OpenAI's shape or a plain text; `domain` "" reads each row's column `domain`.

    Raises:
        ValueError: the hub can't be reached, the data set or split doesn't exist, or a row is wrong.
    """
    import datasets  # takes seconds to load, and most runs don't need it

    try:
        rows = datasets.load_dataset(params.dataset, params.subset or None, split=params.split)
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ValueError(
            f'data set "{params.dataset}" is neither on a hub that can be reached, nor cached, nor a folder ({error}); '
            'the source "file" reads local JSON Lines and Parquet'
        ) from error
    return unique(
        prompt_from_row(
            row, params.column, params.domain, f"{params.dataset}:{number}", f"{params.dataset}, row {number}"
        )
        for number, row in enumerate(rows, start=1)
    )
