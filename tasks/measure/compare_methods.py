"""Measure every method of a family on one target and one text, cell by cell, and sum the cells up over seeds.

A cell is one row under one seed, kept as it is finished. They are measured in this process, because starting one for
each would take longer than most of them, or in several that stay; seconds then are those of a machine that does other
work. Seeds are paired: a row's difference from the baseline is taken seed by seed, and document by document where a
metric has a figure for each, so that what a seed does to all rows alike cancels out (`models.core.evaluation.spread`).

Rows that train do so at a learning rate of their own, which `tasks.measure.sweep` finds before their first cell.

Under a margin, rows get more seeds until they differ from the baseline or are level with it. Differences are looked at
several times meanwhile, so that each look has its share of the error: with L looks an interval is Student's at
1 − α / L. It tells levelness where it lies within ±margin, however sure a difference is that makes none to anybody, and
else a difference where it leaves out 0.
"""

import fnmatch
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from rich.progress import TimeRemainingColumn

from infra.artifacts import open_artifact
from infra.machine import describe_machine, git_commit
from infra.registry import open_registry
from infra.settings import load_settings
from infra.views.comparison import Comparison, MethodFigure, number
from infra.views.results import counting, out, working
from models.core.evaluation.acceptance import CONFIDENCE
from models.core.evaluation.spread import Mean, differences, spread
from models.core.layers.kernels import gpu_name
from models.core.layers.linears import ENOUGH
from models.params import did_you_mean
from models.recipe import Recipe
from models.targets import describe
from models.types import Estimate
from tasks.change_model import CHANGES
from tasks.measure import chain, sweep
from tasks.measure.cells import Cells
from tasks.measure.comparisons import Bench, Metrics, Row
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text, read_documents, tokenise
from tasks.stages import code_hashes, code_version, methods_in
from tasks.stages.samples import SPLITS

ROOMS = ("models", __name__.rpartition(".")[0])  # what figures depend on: algorithms, and what measures them
DTYPE = "float32"  # what models are trained, pruned and quantized in
ALPHA = 0.05
MOST_TOLD = 10_000  # seeds beyond which the number is no use to anybody
Verdict = Literal["differs", "level", "undecided"]


class Margin(NamedTuple):
    """What makes no difference to anybody, and how many seeds may go into showing that."""

    metric: str
    value: float
    most_seeds: int


def compare_methods(
    family: str,
    comparison: ModuleType,
    recipe: Recipe,
    folder: Path,
    budget: float,
    num_seeds: int,
    margin: Margin | None = None,
    only: Sequence[str] = (),
    num_jobs: int = 1,
) -> tuple[Comparison, dict[str, Any]]:
    """Measure what is missing, and return what was found with the setup that it belongs to.

    Under a margin rows are given more seeds until they differ from the baseline, or are level with it. `only` has
    patterns of rows' names; the baseline is measured in any case, and no pattern means all rows. Of `num_jobs` cells
    that are measured at once each has its share of the cores.

    Raises:
        ValueError: the recipe has no text, cells are of another setup, the margin's metric is none of the columns, a
            pattern fits no row, or rows that are timed would be measured at once.
    """
    if margin is not None and margin.metric not in comparison.COLUMNS:
        raise ValueError(f'--margin: no column "{margin.metric}"{did_you_mean(margin.metric, comparison.COLUMNS)}')
    if num_jobs > 1 and getattr(comparison, "TIMED", False):
        raise ValueError(f"--jobs: rows of {family} are told apart by what they take; wanted 1, got {num_jobs}")
    rows, draft = choose_rows(comparison, budget, only), _champion(recipe)
    setup = {
        "name": family,
        "recipe": recipe.model_dump(mode="json", include={"name", "seed", "target", "text"}),
        "budget": budget,
        "rows": {row.name: row.settings for row in rows},
        "code": code_version(*code_modules(comparison, rows), rooms=ROOMS)[:16],
        "sweep": sweep.PLAN if hasattr(comparison, "tune") else None,
        "draft": draft,
        "commit": git_commit(),
        "device": {**describe_machine(gpu_name(load_settings().device)), "dtype": DTYPE},
        "jobs": num_jobs,
    }
    cells = Cells(folder / "cells", setup)
    counts = dict.fromkeys((row.name for row in rows), num_seeds)
    steps = [num_seeds] if margin is None else looks(num_seeds, max(num_seeds, margin.most_seeds))
    verdicts: dict[str, str] = {}
    for step in steps:
        asked = [row for row in rows if row.name not in verdicts]
        counts |= dict.fromkeys((row.name for row in asked), step)
        _measure(comparison, recipe, cells, asked, budget, step, num_jobs)
        measured = {row.name: [cells.read(_cell(row, seed)) for seed in range(counts[row.name])] for row in rows}
        metrics = {name: [metrics_of(one) for one in of_row] for name, of_row in measured.items()}
        if margin is not None:
            verdicts |= decided(metrics, comparison.BASELINE, margin, len(steps))
        if len(verdicts) == len(rows) - 1:
            break
    if margin is not None:
        verdicts = needed(metrics, comparison.BASELINE, margin, len(steps)) | verdicts
    figures = summarise(metrics, comparison.BASELINE)
    about = {"recipe": recipe.name, "budget": budget, "commit": setup["commit"]}
    for row in rows:
        recorded = partial(record, f"compare {family}", about, row, figures[row.name], counts[row.name])
        cells.keep(f"run-{counts[row.name]}-{row.name}", recorded)
    found = Comparison(
        question=comparison.QUESTION,
        baseline=comparison.BASELINE,
        headings=comparison.COLUMNS,
        figures=figures,
        seconds={
            row.name: sweep.seconds(row, cells) + sum(one["seconds"] for one in measured[row.name]) for row in rows
        },
        num_seeds=num_seeds,
        verdicts=verdicts,
        margin="" if margin is None else f"{margin.value:g} of {comparison.COLUMNS[margin.metric]}",
    )
    return found, setup


def _measure(
    comparison: ModuleType,
    recipe: Recipe,
    cells: Cells,
    rows: Sequence[Row],
    budget: float,
    num_seeds: int,
    num_jobs: int,
) -> None:
    wanted = [(row, seed) for seed in range(num_seeds) for row in rows]
    missing = [(row, seed) for row, seed in wanted if not cells.has(_cell(row, seed))]
    if not missing:
        return
    with working("preparing target and text"):
        bench = open_bench(recipe, budget)
    if budget < 1 and "calibrated_tokens" in comparison.COLUMNS:
        each = "tokens for each input of the widest layer"
        _tell(f"calibrated on {budget * ENOUGH:g} {each}; with fewer than {ENOUGH} figures mislead")
    with counting(TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=len(wanted), completed=len(wanted) - len(missing))
        begin = partial(bar.update, task)
        for row, seed, found in _side_by_side(comparison, bench, cells, missing, num_jobs, begin):
            said = ", ".join(f"{name} {number(value)}" for name, value in found["metrics"].items())
            _tell(f"{row.name}, seed {seed}: {said} ({found['seconds']:.0f} s)")
            bar.advance(task)


def _tell(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def _side_by_side(
    comparison: ModuleType,
    bench: Bench,
    cells: Cells,
    missing: Sequence[tuple[Row, int]],
    num_jobs: int,
    begin: Callable[..., None],
) -> Iterator[tuple[Row, int, dict[str, Any]]]:
    """Yield cells as they are finished; `begin` is told what is measured next where that is one at a time."""
    if num_jobs == 1:
        for row, seed in missing:
            begin(description=f"{row.name}, seed {seed}")
            yield row, seed, _kept(comparison.__name__, bench, cells, row, seed)
        return
    num_threads = max(1, torch.get_num_threads() // num_jobs)
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), torch.set_num_threads, (num_threads,)) as pool:
        asked = {pool.submit(_kept, comparison.__name__, bench, cells, *one): one for one in missing}
        try:
            for done in as_completed(asked):
                yield *asked[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():  # a cell takes minutes, and half of one is worth nothing
                child.terminate()
            raise


def _kept(comparison_name: str, bench: Bench, cells: Cells, row: Row, seed: int) -> dict[str, Any]:
    """Measure a cell at the row's own learning rate, and keep both; a module can't be handed to another process."""
    comparison = import_module(comparison_name)
    tuned = sweep.tuned(comparison, bench, row, cells)
    return dict(cells.keep(_cell(row, seed), partial(measure_cell, comparison, bench, tuned, seed)))


def _cell(row: Row, seed: int) -> str:
    return f"{row.name}-seed-{seed}"


def open_bench(recipe: Recipe, budget: float) -> Bench:
    """Build the recipe's target and its text, tokenised, unless they were; ValueError if the recipe has no text."""
    if not recipe.text:
        raise ValueError(f"recipe {recipe.name} has no [text.DOMAIN] table; methods are compared on text")
    target_dir = open_artifact(prepare_target.fn(recipe.target))
    text_dir = open_artifact(prepare_text.fn(recipe.text, recipe.seed))
    train, held_out = (tokenise(read_documents(text_dir, part), target_dir) for part in SPLITS)
    number, draft_dir, settings = _champion(recipe), None, load_settings()
    if number is not None:
        registry = open_registry()
        draft_dir = registry.download(registry.get("draft", number), settings.home / "compare" / "draft")
    return Bench(target_dir, train, held_out, budget, Path(), draft_dir, recipe.num_draft_tokens, settings.device)


def _champion(recipe: Recipe) -> int | None:
    """Return the number of the champion draft, if there is one and it was made for the recipe's target as it is."""
    champion = open_registry().champion("draft")
    if champion is None:
        return None
    card = describe(open_artifact(prepare_target.fn(recipe.target)))
    return champion.number if champion.lineage.target.sha256 == card.sha256 else None


def choose_rows(comparison: ModuleType, budget: float, only: Sequence[str] = ()) -> list[Row]:
    """Return all rows of a comparison, or the baseline and those that a pattern fits.

    ValueError if two have one name, one is no good for a file, none is the baseline, or a pattern fits none.
    """
    rows: list[Row] = comparison.rows(budget)
    names = [row.name for row in rows]
    if len(set(names)) < len(names) or any("/" in name or name.startswith(".") for name in names):
        raise ValueError(f"rows must have different names that are good for files; got {', '.join(names)}")
    if comparison.BASELINE not in names:
        raise ValueError(f'no row is the baseline "{comparison.BASELINE}"; there are: {", ".join(names)}')
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f'--only: no row "{pattern}"{did_you_mean(pattern, names)}')
    patterns = (comparison.BASELINE, *only) if only else ("*",)
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


def code_modules(comparison: ModuleType, rows: Sequence[Row]) -> list[str]:
    """Return the modules that figures depend on, with all that they import: the comparison, the methods of its rows and
    of the constants that it reads, the sweep, and the build's stages where it makes chains of them."""
    imported = (one for one in vars(comparison).values() if isinstance(one, ModuleType))
    beside = [one for one in imported if one.__name__.startswith(ROOMS[1])]
    constants = [value for module in (comparison, *beside) for name, value in vars(module).items() if name.isupper()]
    named = methods_in([*(row.settings for row in rows), *constants])
    own = [comparison.__name__, *named, sweep.__name__]
    stages = {change.__module__ for change in CHANGES.values()}
    return [*own, *sorted(stages)] if chain.__name__ in code_hashes(*own, rooms=ROOMS) else own


def measure_cell(comparison: ModuleType, bench: Bench, row: Row, seed: int) -> dict[str, Any]:
    """Measure one row under one seed; returns `metrics`, `documents`, what each gave of them, and `seconds`.

    ValueError if what was measured is not what the comparison's columns say, or as the method raises it.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="redraft-compare-") as folder:
        measured = comparison.measure(bench._replace(work_dir=Path(folder)), row, seed)
    if measured.keys() != comparison.COLUMNS.keys():
        odd = ", ".join(sorted(measured.keys() ^ comparison.COLUMNS.keys()))
        raise ValueError(f"row {row.name}: measured and COLUMNS differ in {odd}")
    known = {name: value for name, value in measured.items() if not math.isnan(value)}
    return {
        "metrics": {name: float(known[name]) if name in known else None for name in comparison.COLUMNS},
        "documents": {name: value.documents for name, value in known.items() if isinstance(value, Mean)},
        "seconds": time.monotonic() - started_s,
    }


def metrics_of(cell: Mapping[str, Any]) -> Metrics:
    return {**cell["metrics"], **{name: Mean(values) for name, values in cell["documents"].items()}}


def summarise(cells: Mapping[str, Sequence[Metrics]], baseline: str) -> dict[str, dict[str, MethodFigure]]:
    """Sum cells up: row to metric to figure. A row has a cell for each of the baseline's first seeds."""
    figures: dict[str, dict[str, MethodFigure]] = {row: {} for row in cells}
    for metric in cells[baseline][0]:
        gains = differences_from(cells, baseline, metric)
        for row, of_row in cells.items():
            values = [value for one in of_row if (value := one[metric]) is not None]
            known = len(values) == len(of_row)
            figures[row][metric] = MethodFigure(
                value=fmean(values) if known else None,
                interval=t_interval(values) if known else None,
                gain=t_interval(gains[row]) if row in gains else None,
            )
    return figures


def t_interval(values: Sequence[float]) -> Estimate | None:
    """Return the mean over seeds with Student's interval at 95%; None where neither seeds nor documents tell."""
    found = spread(values)
    reach = found.reach(CONFIDENCE)
    return None if math.isinf(reach) else Estimate(value=found.mean, low=found.mean - reach, high=found.mean + reach)


def record(
    title: str, setup: Mapping[str, object], row: Row, figures: Mapping[str, MethodFigure], num_seeds: int
) -> dict[str, str]:
    metrics = {
        f"{metric}{part}": value
        for metric, figure in figures.items()
        for part, value in (
            ("", figure.value),
            ("/low", figure.interval.low if figure.interval else None),
            ("/high", figure.interval.high if figure.interval else None),
            ("/gain", figure.gain.value if figure.gain else None),
        )
        if value is not None
    }
    params = {**setup, "row": row.name, "settings": row.settings, "num_seeds": num_seeds}
    return {"run": open_registry().store.record_run(f"{title}: {row.name}", params, metrics, [])}


def parse_margin(text: str, most_seeds: int) -> Margin:
    """Read "kl 0.05"; ValueError if it is not a column's name and a number above 0."""
    metric, _, value = text.strip().rpartition(" ")
    with suppress(ValueError):
        if metric and float(value) > 0:
            return Margin(metric, float(value), most_seeds)
    raise ValueError(f'--margin: wanted a column\'s name and a number above 0, such as "kl 0.05"; got "{text}"')


def decided(cells: Mapping[str, Sequence[Metrics]], baseline: str, margin: Margin, num_looks: int) -> dict[str, str]:
    """Return row to "differs" or "level", where that is known, or to "no figure", which no seed would change."""
    known = differences_from(cells, baseline, margin.metric)
    found: dict[str, str] = {row: decide(of_row, margin.value, num_looks) for row, of_row in known.items()}
    found |= dict.fromkeys(cells.keys() - known.keys() - {baseline}, "no figure")
    return {row: verdict for row, verdict in found.items() if verdict != "undecided"}


def needed(cells: Mapping[str, Sequence[Metrics]], baseline: str, margin: Margin, num_looks: int) -> dict[str, str]:
    """Return each row to how many more seeds it needs, in words; see `decided`."""
    told = {}
    for row, of_row in differences_from(cells, baseline, margin.metric).items():
        more = seeds_needed(of_row, margin.value, num_looks)
        number = "far" if more is None else f"about {more}"
        told[row] = f"undecided, needs {number} more {'seed' if more == 1 else 'seeds'}"
    return told


def looks(first: int, most: int) -> list[int]:
    """Return after how many seeds to look: the first, then half as many more each time, and `most`."""
    found = [first]
    while found[-1] < most:
        found.append(min(most, math.ceil(1.5 * found[-1])))
    return found


def decide(found: Sequence[float], margin: float, num_looks: int) -> Verdict:
    """Say what differences, row − baseline for each seed, show; of type `Mean` where documents are paired."""
    of_all = spread(found)
    mean, reach = abs(of_all.mean), of_all.reach(1 - ALPHA / num_looks)
    if mean + reach < margin:
        return "level"
    return "differs" if mean > reach else "undecided"


def seeds_needed(found: Sequence[float], margin: float, num_looks: int) -> int | None:
    """Return about how many more seeds would decide, if mean and deviation stay; None for more than anybody runs."""
    of_all = spread(found)
    if math.isnan(of_all.variance):
        return None
    wanted = max(abs(of_all.mean), margin - abs(of_all.mean))
    counts = range(of_all.num_seeds, MOST_TOLD)
    enough = next((count for count in counts if of_all.reach(1 - ALPHA / num_looks, count) < wanted), None)
    return None if enough is None else max(1, enough - of_all.num_seeds)


def differences_from(cells: Mapping[str, Sequence[Metrics]], baseline: str, metric: str) -> dict[str, list[float]]:
    """Return row to its differences from the baseline, by seed; rows of which one has no figure are left out."""
    found = {}
    for row, of_row in cells.items():
        sides = of_row, cells[baseline][: len(of_row)]
        values, bases = ([value for one in some if (value := one[metric]) is not None] for some in sides)
        if row != baseline and len(values) == len(bases) == len(of_row):
            found[row] = differences(values, bases)
    return found
