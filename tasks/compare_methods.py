"""Measure the rows of a comparison cell by cell, and sum them up over seeds.

A cell is one row under one seed. Seeds are paired: a row's difference from the baseline is taken seed by seed, so what
a seed does to all rows alike, such as the documents that it draws, cancels out. Intervals are Student's t over seeds.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from scipy.stats import t as student

from infra.artifacts import open_artifact
from infra.manifest import file_sha256
from models import catalog
from models.acceptance import CONFIDENCE, Estimate
from models.params import Frozen
from tasks.comparisons import Bench, Row
from tasks.lineage import open_registry
from tasks.prepare_target import prepare_target
from tasks.recipe import Recipe
from tasks.stages import code_version
from tasks.text import prepare_text, read_documents, tokenise

# metric → its value; None where it makes no sense for the row.
Metrics = dict[str, float | None]
# What comparisons of all families draw, train and score with.
SHARED = ("tasks.comparisons", "models.training", "models.perplexity")


class Figure(Frozen):
    """One metric of one row.

    Attributes:
        value: mean over seeds; None where the metric makes no sense for the row.
        interval: with one seed there is none.
        gain: the row's difference from the baseline, paired by seed; None for the baseline and with one seed.
    """

    value: float | None
    interval: Estimate | None = None
    gain: Estimate | None = None

    @property
    def differs(self) -> bool:
        """Whether the interval of the difference from the baseline leaves out 0."""
        return self.gain is not None and not self.gain.low <= 0 <= self.gain.high


def open_bench(recipe: Recipe, budget: float) -> Bench:
    """Build the recipe's target and its text, tokenised; what is there is not made again.

    Raises:
        ValueError: the recipe has no text.
    """
    if not recipe.text:
        raise ValueError(f"recipe {recipe.name} has no [text.DOMAIN] tables, and methods are compared on text")
    target_dir = open_artifact(prepare_target.fn(recipe.target))
    text_dir = open_artifact(prepare_text.fn(recipe.text, recipe.seed))
    parts = [tokenise(read_documents(text_dir, part), target_dir) for part in ("train", "held_out")]
    return Bench(target_dir, *parts, budget, work_dir=Path())


def choose_rows(comparison: ModuleType, budget: float) -> list[Row]:
    """Return what a comparison compares.

    Raises:
        ValueError: two rows have one name, a name is no good for a file's, or none is the baseline.
    """
    rows = comparison.rows(budget)
    names = [row.name for row in rows]
    if len(set(names)) < len(names) or any("/" in name or name.startswith(".") for name in names):
        raise ValueError(f"rows must have different names that are good for files; got {', '.join(names)}")
    if comparison.BASELINE not in names:
        raise ValueError(f'no row is the baseline "{comparison.BASELINE}"; there are: {", ".join(names)}')
    return rows


def comparison_code(comparison: ModuleType, family: str) -> str:
    """Return a hash of what is compared and how, so that figures of other code are not mixed in."""
    methods = [f"models.{family}.{name}" for name in catalog.names(family)] if _is_family(family) else []
    return f"{file_sha256(Path(str(comparison.__file__)))[:16]}-{code_version(*SHARED, *methods)[:16]}"


def _is_family(name: str) -> bool:
    return (Path(catalog.__file__).parent / name / "__init__.py").is_file()


def measure_cell(comparison: ModuleType, bench: Bench, row: Row, seed: int) -> dict[str, Any]:
    """Measure one row under one seed; returns `metrics`, as `Metrics`, and `seconds`.

    Raises:
        ValueError: what was measured is not what the comparison's columns say, or as the method raises it.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="redraft-compare-") as folder:
        measured = comparison.measure(bench._replace(work_dir=Path(folder)), row, seed)
    if measured.keys() != comparison.COLUMNS.keys():
        odd = ", ".join(sorted(measured.keys() ^ comparison.COLUMNS.keys()))
        raise ValueError(f"row {row.name}: measured and COLUMNS differ in {odd}")
    metrics: Metrics = {name: None if math.isnan(value) else float(value) for name, value in measured.items()}
    return {"metrics": metrics, "seconds": time.monotonic() - started_s}


def summarise(cells: Mapping[str, Sequence[Metrics]], baseline: str) -> dict[str, dict[str, Figure]]:
    """Sum cells up.

    Args:
        cells: row to its metrics, a seed each, the same seeds for all.
        baseline: the row that the others are told against.

    Returns:
        Row to metric to figure.
    """
    metrics = cells[baseline][0]
    return {
        row: {
            metric: _figure(
                [one[metric] for one in of_row], None if row == baseline else [one[metric] for one in cells[baseline]]
            )
            for metric in metrics
        }
        for row, of_row in cells.items()
    }


def _figure(values: Sequence[float | None], baseline: Sequence[float | None] | None) -> Figure:
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return Figure(value=None)
    gain = None
    if baseline is not None and None not in baseline:
        gain = t_interval([value - base for value, base in zip(found, baseline, strict=True)])
    return Figure(value=sum(found) / len(found), interval=t_interval(found), gain=gain)


def t_interval(values: Sequence[float]) -> Estimate | None:
    """Return the mean with Student's interval at 95%; None for a single value. Values are taken as normal."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    reach = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - reach, high=mean + reach)


def recorder(family: str, setup: Mapping[str, object]) -> Callable[[Row, dict[str, Figure], int], dict[str, str]]:
    """Return what records a row as a run in MLflow, and returns the run's id."""
    registry = open_registry()

    def record(row: Row, figures: dict[str, Figure], num_seeds: int) -> dict[str, str]:
        metrics: dict[str, float] = {}
        for metric, figure in figures.items():
            ends = {"": figure.value, "/low": figure.interval and figure.interval.low}
            ends |= {"/high": figure.interval and figure.interval.high, "/gain": figure.gain and figure.gain.value}
            metrics |= {f"{metric}{end}": value for end, value in ends.items() if value is not None}
        params = {**setup, "row": row.name, "settings": row.settings, "num_seeds": num_seeds}
        return {"run": registry.store.record_run(f"compare {family}: {row.name}", params, metrics, [])}

    return record
