"""What `redraft compare FAMILY` measures: one file a family, of the same shape.

A file has

- `QUESTION`: what its table answers, a sentence;
- `BASELINE`: the name of the row that the others are told against;
- `COLUMNS`: metric to heading, with the unit and which way is better;
- `rows(budget) -> list[Row]`: what is compared; `budget` scales how much is trained or calibrated, 1 being minutes for
  the whole family on two cores;
- `measure(bench, row, seed) -> dict[str, float]`: one row under one seed, all of `COLUMNS` and nothing else; a metric
  that makes no sense for a row is NaN.

Rows and seeds are measured in any order, each kept as soon as it is finished, so `measure` depends on its arguments
alone.
"""

from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        name: the heading, good for a file's name.
        settings: what `measure` needs to know, as JSON, such as a table of a recipe.
    """

    name: str
    settings: dict[str, Any]


class Bench(NamedTuple):
    """What all rows of a table share.

    Attributes:
        target_dir: the model that is trained, pruned or quantized.
        train: token ids of documents to train or calibrate on, by domain.
        held_out: the same, of other groups, to measure on.
        budget: as given to `rows`.
        work_dir: an empty folder of this cell's own, removed afterwards.
    """

    target_dir: Path
    train: dict[str, list[list[int]]]
    held_out: dict[str, list[list[int]]]
    budget: float
    work_dir: Path
