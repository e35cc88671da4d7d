"""The learning rate that suits a row, so that no method is ahead because one rate for all happens to suit it.

A row is trained at the `learning_rate` of its settings, at a third of it and at three times as much, and further on
while the best of them is the outermost, `MOST_RUNS` times at most. The one with the least loss is the row's own under
every seed. Looked for is it under one seed, on documents of the training part that are set aside: they are neither
learnt meanwhile nor among those that the table reports.
"""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks.measure.cells import Cells
from tasks.measure.comparisons import Bench, Row

COLUMNS = {"rate": "learning rate, the best of a sweep"}
FACTOR, MOST_RUNS, SEED = 3.0, 5, 0
SET_ASIDE = 8  # one document of so many of each domain
# What sweeps depend on besides code, rows and text.
PLAN = {"factor": FACTOR, "most_runs": MOST_RUNS, "seed": SEED, "set_aside": SET_ASIDE}


def find_rate(start: float, loss_at: Callable[[float], float]) -> dict[float, float]:
    """Return rate to loss of a few rates, each `FACTOR` times the one below, in the order in which they were tried.

    `loss_at` trains at one; training diverges where it returns NaN or raises FloatingPointError: its loss is infinite.
    ValueError if it does at all of them.
    """
    losses: dict[int, float] = {}

    def rate(place: int) -> float:
        return float(f"{start * FACTOR**place:.3g}")

    wanted = [0, -1, 1]
    while wanted and len(losses) < MOST_RUNS:
        place = wanted.pop(0)
        try:
            loss = loss_at(rate(place))
        except FloatingPointError:
            loss = math.inf
        losses[place] = math.inf if math.isnan(loss) else loss
        best = min(losses, key=losses.__getitem__)
        if not wanted and best in (outer := {min(losses): -1, max(losses): 1}):
            wanted = [best + outer[best]]
    if math.isinf(losses[best]):
        tried = ", ".join(f"{rate(place):g}" for place in sorted(losses))
        raise ValueError(f"training diverges at every learning rate of the sweep: {tried}")
    return {rate(place): loss for place, loss in losses.items()}


def set_aside(bench: Bench) -> Bench:
    """Return a bench whose held-out documents are the last of each domain's training part, which it lacks itself.

    ValueError names a domain with fewer than two documents to train on.
    """
    train, held_out = {}, {}
    for domain, documents in bench.train.items():
        if len(documents) < 2:
            raise ValueError(f'domain "{domain}" has {len(documents)} training documents; a sweep takes 2 or more')
        num_aside = max(1, len(documents) // SET_ASIDE)
        train[domain], held_out[domain] = documents[:-num_aside], documents[-num_aside:]
    return bench._replace(train=train, held_out=held_out)


def sweep_row(comparison: ModuleType, bench: Bench, row: Row) -> dict[str, Any]:
    """Look for a row's rate by the comparison's `tune`, from its `learning_rate` on.

    Returns `rate`, `losses`, pairs of rate and loss, None for infinite, and `seconds`. ValueError, as `find_rate`,
    `set_aside` or the method raises it, names the row.
    """
    started_s, aside = time.monotonic(), set_aside(bench)

    def loss_at(rate: float) -> float:
        with tempfile.TemporaryDirectory(prefix="redraft-sweep-") as folder:
            loss: float = comparison.tune(aside._replace(work_dir=Path(folder)), at_rate(row, rate), SEED)
            return loss

    try:
        losses = find_rate(row.settings["learning_rate"], loss_at)
    except ValueError as error:
        raise ValueError(f"row {row.name}: {error}") from error
    return {
        "rate": min(losses, key=losses.__getitem__),
        "losses": [[rate, None if math.isinf(loss) else loss] for rate, loss in losses.items()],
        "seconds": time.monotonic() - started_s,
    }


def tuned(comparison: ModuleType, bench: Bench, row: Row, cells: Cells) -> Row:
    """Return a row at its own learning rate, looked for now unless a sweep of it is on disk; others as they are.

    A row that says `against` which other one it is measured gets that one's rate too, as `against_rate`.
    """
    if not hasattr(comparison, "tune") or row.settings.get("learning_rate") is None:
        return row
    found = at_rate(row, _rate(comparison, bench, row, cells))
    if (against := row.settings.get("against")) is not None:
        other = next(one for one in comparison.rows(bench.budget) if one.name == against)
        found = found._replace(settings={**found.settings, "against_rate": _rate(comparison, bench, other, cells)})
    return found


def seconds(row: Row, cells: Cells) -> float:
    return float(cells.read(_cell(row))["seconds"]) if cells.has(_cell(row)) else 0.0


def at_rate(row: Row, rate: float) -> Row:
    return row._replace(settings={**row.settings, "learning_rate": rate})


def rate_of(row: Row) -> float:
    """Return what stands in the column of `COLUMNS`, NaN for a row that does not train."""
    return float(row.settings.get("learning_rate") or math.nan)


def _rate(comparison: ModuleType, bench: Bench, row: Row, cells: Cells) -> float:
    return float(cells.keep(_cell(row), lambda: sweep_row(comparison, bench, row))["rate"])


def _cell(row: Row) -> str:
    return f"{row.name}-sweep"
