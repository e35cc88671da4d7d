"""B7: how long the main job takes: `redraft demo` in a home of its own, from nothing, then with all that it made."""

import shutil
import time
from collections.abc import Mapping
from typing import Any

from infra.environment import environment_of
from infra.views.results import Grid, Report
from tasks.measure.child import run_program
from tasks.measure.run import Run

TITLE, QUESTION = "B7", "how long does the main job take?"
AIM_S = 15 * 60
REST = "starting and ending"

Row = dict[str, Any]


def measure(run: Run) -> Report:
    """Run the demonstration twice; a first run that was interrupted begins from nothing again.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    first = run.cells.keep("first", lambda: _first(run))
    return report(first, run.cells.keep("second", lambda: _timed(run)))


def _first(run: Run) -> Row:
    shutil.rmtree(run.folder / "demo", ignore_errors=True)
    return _timed(run)


def _timed(run: Run) -> Row:
    """Run the demonstration as its command does, and return its figures with the seconds around it."""
    home = run.folder / "demo"
    argv = [*run.redraft, "demo", "--recipe", run.recipe_name]
    started_s = time.monotonic()
    with run.bar("redraft demo", 1) as bar:
        result = run_program(argv, environment_of(home), home / "logs" / "demo.log", "the demonstration")
        bar.advance()
    seconds = time.monotonic() - started_s
    return {"wall_s": round(seconds, 1), "stages": result["stage_seconds"], "requests": result["requests"]}


def report(first: Mapping[str, Any], second: Mapping[str, Any]) -> Report:
    """Put both runs side by side, stage by stage."""
    stages = list(dict.fromkeys([*first["stages"], *second["stages"]]))
    rows = [[stage, *(_cell(one["stages"].get(stage)) for one in (first, second))] for stage in stages]
    rows.append([REST, *(_cell(one["wall_s"] - sum(one["stages"].values())) for one in (first, second))])
    rows.append(["all", *(_cell(one["wall_s"]) for one in (first, second))])
    meets = first["wall_s"] <= AIM_S
    return Report(
        figures={"first": dict(first), "second": dict(second)},
        grids=[Grid("seconds", ["stage", "from nothing", "once more"], rows)],
        verdict=(
            f"{'meets' if meets else 'misses'} the bar of {AIM_S / 60:.0f} minutes: "
            f"{first['wall_s'] / 60:.1f} minutes from nothing, {second['wall_s'] / 60:.1f} once more."
        ),
    )


def _cell(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"
