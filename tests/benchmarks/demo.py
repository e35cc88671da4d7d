"""How long the main job takes: `redraft demo` in a home of its own, from nothing, then with all that it made.

python -m tests.benchmarks.demo
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from infra.environment import environment_of
from tasks.measure.run import Run
from tests.benchmarks.scripts import PROGRAM, arguments, open_run, run_program, show

REST = "starting and ending"

Row = dict[str, Any]


def measure(run: Run) -> dict[str, Row]:
    """Run the demonstration twice; a first run that was interrupted begins from nothing again."""

    def first() -> Row:
        shutil.rmtree(run.folder / "demo", ignore_errors=True)
        return _timed(run)

    return {"first": run.cells.keep("first", first), "second": run.cells.keep("second", lambda: _timed(run))}


def _timed(run: Run) -> Row:
    """Run the demonstration as its command does, and return its figures with the seconds around it."""
    home = run.folder / "demo"
    argv = [*PROGRAM, "demo", "--recipe", run.recipe_name]
    started_s = time.monotonic()
    with run.bar("redraft demo", 1) as bar:
        result = run_program(argv, environment_of(home), home / "logs" / "demo.log", "the demonstration")
        bar.advance()
    seconds = time.monotonic() - started_s
    return {"wall_s": round(seconds, 1), "stages": result["stage_seconds"], "requests": result["requests"]}


def table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Put runs side by side, stage by stage."""
    stages = list(dict.fromkeys(stage for one in runs for stage in one["stages"]))
    rows = [[stage, *(_cell(one["stages"].get(stage)) for one in runs)] for stage in stages]
    rows.append([REST, *(_cell(one["wall_s"] - sum(one["stages"].values())) for one in runs)])
    return [*rows, ["all", *(_cell(one["wall_s"]) for one in runs)]]


def _cell(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


def main() -> None:
    """Measure and print."""
    given = arguments("Time the demonstration.").parse_args()
    run = open_run("demo", given)
    found = measure(run)
    rows = table([*found.values()])
    show({**run.setup, **found}, "seconds", ["stage", "from nothing", "once more"], rows)


if __name__ == "__main__":
    main()
