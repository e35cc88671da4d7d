"""Commands `redraft bench …`. Finished cells are reused, so an interrupted benchmark continues."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.command import RecipeName, command_of
from infra.environment import enter_home
from infra.home import open_home
from infra.settings import load_settings
from models.recipe import DEFAULT_RECIPE, load_recipe

bench = typer.Typer(
    name="bench",
    help="Measure a recipe's service, in a home of its own.",
    no_args_is_help=True,
)
command = command_of(bench)

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder for cells and report; by default in the home folder."),
]
NumPrompts = Annotated[int, typer.Option("--prompts", min=1, help="Held-out prompts per domain.")]
NumRounds = Annotated[int, typer.Option("--rounds", min=1, help="How many times the compared ways take turns.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]


@command
def speed(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 100,
    num_rounds: NumRounds = 4,
) -> None:
    """B1: tokens/s and inter-token latency at one stream, compared with vLLM's other ways, transformers, our reference.

    Example: redraft bench speed --prompts 16 --rounds 1
    """
    _run("speed", recipe, output, num_prompts=num_prompts, num_rounds=num_rounds)


@command
def swap(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 16,
    num_swaps: Annotated[int, typer.Option("--swaps", min=1, help="How many swaps.")] = 20,
    per_cell: Annotated[int, typer.Option(min=1, help="Swaps per cell, which is measured and kept as a whole.")] = 5,
    concurrency: Concurrency = 4,
) -> None:
    """B4: failures and stalls near a swap under load, compared with no swap and with a restart.

    Example: redraft bench swap --swaps 10
    """
    options = {"num_prompts": num_prompts, "num_swaps": num_swaps, "per_cell": per_cell, "concurrency": concurrency}
    _run("swap", recipe, output, **options)


@command
def logging(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 50,
    num_rounds: NumRounds = 4,
    concurrency: Concurrency = 8,
    num_rows: Annotated[
        int, typer.Option("--rows", min=1, help="Rows to write when the log alone is measured.")
    ] = 4096,
) -> None:
    """B6: latency with logging on and off, and how many rows per second the query log takes.

    Example: redraft bench logging --prompts 100 --rounds 1
    """
    options = {"num_prompts": num_prompts, "num_rounds": num_rounds, "concurrency": concurrency, "num_rows": num_rows}
    _run("logging", recipe, output, **options)


@command
def demo(recipe: RecipeName = DEFAULT_RECIPE, output: Output = None) -> None:
    """B7: wall time of the demo stage by stage, first from nothing, then with finished steps reused.

    Example: redraft bench demo
    """
    _run("demo", recipe, output)


@command
def trainer(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 16,
    num_rounds: NumRounds = 2,
    concurrency: Concurrency = 1,
    pause_s: Annotated[float, typer.Option("--pause", min=0, help="Seconds a client waits between requests.")] = 1,
    quiet_s: Annotated[
        float, typer.Option("--quiet", min=1, help="Seconds measured without a refresh, before and after.")
    ] = 120,
    most_s: Annotated[float, typer.Option("--most", min=1, help="Seconds after which the refresh is stopped.")] = 1200,
) -> None:
    """B9: inter-token latency while a refresh trains beside the service, compared with none.

    Example: redraft bench trainer --prompts 12 --rounds 1
    """
    options = {"num_prompts": num_prompts, "num_rounds": num_rounds, "concurrency": concurrency}
    _run("trainer", recipe, output, **options, pause_s=pause_s, quiet_s=quiet_s, most_s=most_s)


@command
def gate(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_runs: Annotated[int, typer.Option("--runs", min=10, help="Champions of each kind of challenger.")] = 500,
    num_windows: Annotated[
        int, typer.Option("--windows", min=4, help="Windows that a champion is challenged for.")
    ] = 1000,
) -> None:
    """How often the gate promotes a draft without gain, and how soon one with a gain; by simulation.

    Example: redraft bench gate --runs 200
    """
    _run("gate", recipe, output, num_runs=num_runs, num_windows=num_windows)


@command
def watch(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="How often each case is simulated.")] = 1000,
) -> None:
    """How soon a draft that does worse is taken back, and how often one that does not, by simulation.

    Example: redraft bench watch --runs 200
    """
    _run("watch", recipe, output, num_runs=num_runs)


def _run(name: str, recipe: str, output: Path | None, **options: Any) -> None:
    """Measure and report; RuntimeError if the report says that something is wrong."""
    settings = load_settings()
    open_home(settings)
    folder = (output or settings.home / "bench" / f"{name}-{Path(recipe).stem}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    enter_home(folder / "home")
    from infra.views.results import publish
    from tasks.measure.run import Run

    redraft = (sys.executable, "-m", "flows.cli")
    run = Run(name, load_recipe(recipe), recipe, folder, settings, options, redraft)
    benchmark = import_module(f"tasks.measure.{name}")
    report = benchmark.measure(run, **options)
    typed = " ".join(["redraft", *sys.argv[1:]])
    publish(report, folder, benchmark.TITLE, benchmark.QUESTION, typed, run.setup)
    if report.failures:
        raise RuntimeError("; ".join(report.failures))
