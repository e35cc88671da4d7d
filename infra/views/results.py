"""What is being done, on the terminal, and what a benchmark or comparison found: there, as JSON and as Markdown."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from models.types import Frozen

RESULT, BLOCK = "result.json", "report.md"
LINE_S = 30.0  # between two lines where there is no terminal
out = Console()


@contextmanager
def working(said: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done until the block ends, and yield what says how far it is: beside a spinner, or in lines."""
    if out.is_terminal:
        with out.status(said) as shown:
            yield shown.update
        return
    out.print(said, soft_wrap=True, markup=False, highlight=False)
    told_s = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= LINE_S:
            told_s = time.monotonic()
            out.print(line, soft_wrap=True, markup=False, highlight=False)

    yield tell


def counting(*more: ProgressColumn, console: Console = out) -> Progress:
    counted = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*counted, *more, TimeElapsedColumn(), console=console)


class Grid(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Report(Frozen):
    """What was found; `failures` make the command fail after it has reported, `notes` belong under the tables."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    figures: dict[str, Any]
    grids: list[Grid]
    notes: list[str] = Field(default_factory=list)
    failures: list[str] = Field(default_factory=list)
    picture: Path | None = None


def publish(
    report: Report, folder: Path, title: str, question: str, command: str, setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `result.json` and `report.md` into `folder`, show the tables, and end with the JSON line.

    `command` is what to type to repeat it, `setup` what the figures belong to: commit, device, settings.
    """
    result = {"benchmark": title, **setup, **report.figures, "failures": report.failures}
    (folder / RESULT).write_text(json.dumps(result, allow_nan=False) + "\n")
    (folder / BLOCK).write_text(markdown(report, title, question, command, setup))
    for grid in report.grids:
        table = Table(*grid.columns, title=grid.title)
        for row in grid.rows:
            table.add_row(*row)
        out.print(table)
    for line in report.notes:
        out.print(line, markup=False, highlight=False)
    for file in filter(None, (folder / RESULT, folder / BLOCK, report.picture)):
        out.print(f"{file}", soft_wrap=True)
    print(json.dumps(result, allow_nan=False))
    return result


def markdown(report: Report, title: str, question: str, command: str, setup: Mapping[str, Any]) -> str:
    device = setup["device"]
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    gpu = f"{device['gpu']}, " if "gpu" in device else ""
    where = f"{gpu}{device['processor']}, {device['cores']} cores, {device['dtype']}, {versions}"
    lines = [
        f"## {datetime.now(UTC):%Y-%m-%d}: {question} ({title})",
        "",
        f"`{command}`, commit {setup['commit'][:7] or 'unknown'}, {where}.",
    ]
    for grid in report.grids:
        rows = [grid.columns, ["---"] * len(grid.columns), *grid.rows]
        lines += ["", f"{grid.title}:", "", *(f"| {' | '.join(row)} |" for row in rows)]
    lines += ["", *report.notes, *(f"Failed: {one}." for one in report.failures), ""]
    return "\n".join(lines)


def spread(value: Mapping[str, float], digits: int = 1) -> str:
    """Return a median with its tenth and ninetieth percentile."""
    return f"{value['median']:.{digits}f} ({value['p10']:.{digits}f} to {value['p90']:.{digits}f})"


def interval(value: Mapping[str, float], digits: int = 2) -> str:
    """Return a figure with the ends of its interval."""
    return f"{value['value']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"
