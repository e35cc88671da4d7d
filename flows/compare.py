"""`redraft compare FAMILY`: every method of a family on one target and one text, against a baseline, over seeds.

Cells are kept as they are finished, first all rows under the first seed; run again, it goes on with what is missing.
Cells are measured in this process, because starting one for each would take longer than most of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flows.cells import Cells
from flows.results import Grid, Report, out, publish
from infra.machine import describe_machine
from infra.settings import Settings
from tasks.find_comparison import load_comparison

if TYPE_CHECKING:
    from tasks.compare_methods import Figure
    from tasks.comparisons import Row

FEWEST_SEEDS = 3
DTYPE = "float32"  # what models are trained, pruned and quantized in


def compare(
    family: str,
    recipe_name: str,
    settings: Settings,
    budget: float,
    num_seeds: int,
    output: Path | None,
    typed: str,
) -> dict[str, Any]:
    """Measure what is missing and report; returns what `result.json` holds.

    Args:
        family: names the comparison.
        recipe_name: its target and its text are used.
        settings: say where everything lies.
        budget: how much is trained or calibrated.
        num_seeds: the seeds are 0, 1, ….
        output: where cells and report lie; None takes a folder below the home.
        typed: the command to repeat it.

    Raises:
        ValueError: there is no such comparison or recipe, the recipe has no text, cells are of another setup.
    """
    comparison = load_comparison(family)
    from flows.recipe import load_recipe
    from tasks.compare_methods import choose_rows, comparison_code, recorder, summarise
    from tasks.lineage import git_commit

    recipe, rows = load_recipe(recipe_name), choose_rows(comparison, budget)
    folder = (output or settings.home / "compare" / f"{family}-{Path(recipe_name).stem}").absolute()
    tables = recipe.model_dump(mode="json", include={"name", "seed", "target", "text"})
    setup = {
        "name": family,
        "recipe": tables,
        "budget": budget,
        "rows": {row.name: row.settings for row in rows},
        "code": comparison_code(comparison, family),
        "commit": git_commit(),
        "device": {**describe_machine(), "dtype": DTYPE},
    }
    cells = Cells(folder / "cells", setup)
    _measure(comparison, recipe, cells, rows, budget, num_seeds)
    measured = {row.name: [cells.read(_cell(row, seed)) for seed in range(num_seeds)] for row in rows}
    figures = summarise(
        {name: [one["metrics"] for one in of_row] for name, of_row in measured.items()}, comparison.BASELINE
    )
    record = recorder(family, {"recipe": recipe.name, "budget": budget, "commit": setup["commit"]})
    for row in rows:
        cells.keep(f"run-{num_seeds}-{row.name}", lambda row=row: record(row, figures[row.name], num_seeds))
    seconds = {name: sum(one["seconds"] for one in of_row) for name, of_row in measured.items()}
    report = _report(comparison, figures, seconds, num_seeds, folder)
    return publish(report, folder, f"compare {family}", comparison.QUESTION, typed, setup)


def _measure(
    comparison: ModuleType, recipe: Any, cells: Cells, rows: "list[Row]", budget: float, num_seeds: int
) -> None:
    from tasks.compare_methods import measure_cell, open_bench

    wanted = [(row, seed) for seed in range(num_seeds) for row in rows]
    missing = [(row, seed) for row, seed in wanted if not cells.has(_cell(row, seed))]
    if not missing:
        return
    with out.status("making target and text ready"):
        bench = open_bench(recipe, budget)
    with _bar(len(wanted) - len(missing), len(wanted)) as bar:
        for row, seed in missing:
            bar.update(bar.task_ids[0], description=f"{row.name}, seed {seed}")
            found = cells.keep(_cell(row, seed), lambda row=row, seed=seed: measure_cell(comparison, bench, row, seed))
            said = ", ".join(f"{name} {_number(value)}" for name, value in found["metrics"].items())
            told = f"{row.name}, seed {seed}: {said} ({found['seconds']:.0f} s)"
            out.print(told, markup=False, highlight=False, soft_wrap=True)
            bar.advance(bar.task_ids[0])


@contextmanager
def _bar(done: int, total: int) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out) as progress:
        progress.add_task("", total=total, completed=done)
        yield progress


def _cell(row: "Row", seed: int) -> str:
    return f"{row.name}-seed-{seed}"


def _report(
    comparison: ModuleType,
    figures: "Mapping[str, Mapping[str, Figure]]",
    seconds: Mapping[str, float],
    num_seeds: int,
    folder: Path,
) -> Report:
    from tasks.figures import draw_comparison

    headings, baseline = comparison.COLUMNS, comparison.BASELINE
    values = [
        [row, *(_spread(of_row[metric]) for metric in headings), f"{seconds[row]:.0f}"]
        for row, of_row in figures.items()
    ]
    gains = [
        [row, *(_gain(of_row[metric]) for metric in headings)] for row, of_row in figures.items() if row != baseline
    ]
    grids = [Grid(f"mean over {num_seeds} seeds", ["", *headings.values(), "seconds, all seeds"], values)]
    notes = []
    if num_seeds > 1:
        grids.append(Grid(f"difference from {baseline}, seed by seed", ["", *headings.values()], gains))
        notes.append("Intervals are 95% of Student's t over seeds, each by itself; * leaves out no difference.")
    if num_seeds < FEWEST_SEEDS:
        notes.append(f"{num_seeds} of at least {FEWEST_SEEDS} seeds: take no method for better on these figures.")
    told = {heading: [row for row in figures if figures[row][metric].differs] for metric, heading in headings.items()}
    said = "; ".join(f"{heading}: {', '.join(found)}" for heading, found in told.items() if found)
    return Report(
        figures={
            "question": comparison.QUESTION,
            "baseline": baseline,
            "num_seeds": num_seeds,
            "rows_measured": {
                row: {metric: figure.model_dump() for metric, figure in of_row.items()}
                for row, of_row in figures.items()
            },
            "seconds": dict(seconds),
        },
        grids=grids,
        notes=notes,
        verdict=f"different from {baseline} at 95%: {said or 'nothing'}.",
        picture=draw_comparison(figures, headings, folder / "compare.png"),
    )


def _spread(figure: "Figure") -> str:
    if figure.interval is None:
        return _number(figure.value)
    return f"{_number(figure.value)} ± {_number(figure.interval.high - figure.interval.value)}"


def _gain(figure: "Figure") -> str:
    if figure.gain is None:
        return "–"
    low, high = _number(figure.gain.low), _number(figure.gain.high)
    return f"{_number(figure.gain.value)} ({low} to {high}){'*' if figure.differs else ''}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
