"""What the scripts beside it share: arguments, a run in a home of its own, a table, and one JSON line at the end.

A script that measures a built recipe works on copies of what is served, in a home of its own, and keeps what it has
measured cell by cell: run again, it goes on with the cells that are missing.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from infra.environment import enter_home
from infra.home import open_home
from infra.machine import describe_machine, git_commit
from infra.processes import Child
from infra.settings import load_settings
from models.recipe import DEFAULT_RECIPE, load_recipe
from tasks.measure.run import Run

POLL_S = 1.0
PROGRAM = (sys.executable, "-m", "flows.cli")
OWN = ("recipe", "output")


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    parser.add_argument("--output", type=Path, help="folder for cells; by default in the home folder")
    return parser


def open_run(name: str, given: argparse.Namespace) -> Run:
    """Enter the script's own home, and open the cells that an earlier run has finished.

    Args:
        name: of the script.
        given: what its parser found; all of it but recipe and folder is what the figures depend on.
    """
    settings = load_settings()
    open_home(settings)
    folder = (given.output or settings.home / "bench" / f"{name}-{Path(given.recipe).stem}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    enter_home(folder / "home")
    options = {key: value for key, value in vars(given).items() if key not in OWN}
    return Run(name, load_recipe(given.recipe), given.recipe, folder, settings, options, PROGRAM)


def show(figures: Mapping[str, Any], title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and as one JSON line the figures with commit and machine."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(json.dumps({"commit": git_commit(), "device": describe_machine(), **figures}, allow_nan=False))


def summary(after: NDArray[np.float64], within: int) -> dict[str, float | None]:
    """Return of requests after which something was told, infinite for never: how often, how often soon, the median."""
    median = float(np.median(after))
    told, soon = float(np.isfinite(after).mean()), float((after <= within).mean())
    return {"told": told, "within": soon, "median": median if np.isfinite(median) else None}


def cells(one: Mapping[str, float | None]) -> tuple[str, str, str]:
    """Return what a table shows of a summary."""
    return f"{one['told']:.1%}", f"{one['within']:.1%}", "–" if one["median"] is None else f"{one['median']:,.0f}"


def require_equal(verdicts: Mapping[str, int]) -> dict[str, int]:
    """Return the verdicts on outputs; RuntimeError if one differs, since then no speed is worth anything."""
    if different := verdicts.get("different"):
        raise RuntimeError(f"{different} outputs differ from those without speculation")
    return dict(verdicts)


def run_program(argv: Sequence[str], environment: Mapping[str, str], log: Path, name: str) -> dict[str, Any]:
    """Run a program and return the last JSON object among its lines.

    Args:
        argv: the program and its arguments.
        environment: variables added to this process's own.
        log: where its output goes; what was there is lost.
        name: what messages call it.

    Raises:
        RuntimeError: it failed or printed no JSON object; the message has the end of its log.
    """
    log.unlink(missing_ok=True)
    with Child.start(argv, environment, log, name) as child:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
    # Libraries say goodbye on standard error, which is in the same file.
    objects = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    if code or not objects:
        raise RuntimeError(f"{name} ended with {code} and {len(objects)} results\n{child.tail()}")
    found: dict[str, Any] = json.loads(objects[-1])
    return found
