"""Commands `redraft bench …`. Each keeps what it has measured; run again, it goes on with what is missing."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.bench.environment import enter_home
from flows.command import DEFAULT_RECIPE, RecipeName, command_of
from infra.settings import load_settings

bench = typer.Typer(
    name="bench",
    help="Measure a recipe's service against its peers, in a home of its own.",
    no_args_is_help=True,
)
command = command_of(bench)

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Where cells and report lie; by default below the home folder."),
]
NumPrompts = Annotated[int, typer.Option("--prompts", min=1, help="Held-out prompts of each domain.")]
NumRounds = Annotated[int, typer.Option("--rounds", min=1, help="How often the sides take turns.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]


@command
def speed(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 100,
    num_rounds: NumRounds = 4,
) -> None:
    """B1: tokens/s and inter-token latency at one stream, against vLLM's other ways, transformers and our reference."""
    _run("speed", recipe, output, num_prompts=num_prompts, num_rounds=num_rounds)


@command
def swap(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 16,
    num_swaps: Annotated[int, typer.Option("--swaps", min=1, help="Swaps in all.")] = 20,
    per_cell: Annotated[int, typer.Option(min=1, help="Swaps that are measured and kept together.")] = 5,
    concurrency: Concurrency = 4,
) -> None:
    """B4: failures and stalls near a swap under load, against windows without one and against a restart."""
    options = {"num_prompts": num_prompts, "num_swaps": num_swaps, "per_cell": per_cell, "concurrency": concurrency}
    _run("swap", recipe, output, **options)


@command
def logging(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 50,
    num_rounds: NumRounds = 4,
    concurrency: Concurrency = 8,
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Rows that are offered to the log alone.")] = 4096,
) -> None:
    """B6: latency with logging on and off, and how many rows a second the query log takes."""
    options = {"num_prompts": num_prompts, "num_rounds": num_rounds, "concurrency": concurrency, "num_rows": num_rows}
    _run("logging", recipe, output, **options)


@command
def demo(recipe: RecipeName = DEFAULT_RECIPE, output: Output = None) -> None:
    """B7: wall time of the demonstration stage by stage, from nothing and once more."""
    _run("demo", recipe, output)


@command
def trainer(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 16,
    num_rounds: NumRounds = 2,
    concurrency: Concurrency = 1,
    pause_s: Annotated[float, typer.Option("--pause", min=0, help="Seconds that a client waits between requests.")] = 1,
    quiet_s: Annotated[
        float, typer.Option("--quiet", min=1, help="Seconds without a refresh, before and after.")
    ] = 120,
    most_s: Annotated[float, typer.Option("--most", min=1, help="Seconds after which a refresh is stopped.")] = 1200,
) -> None:
    """B9: inter-token latency while a refresh trains beside the service, against none."""
    options = {"num_prompts": num_prompts, "num_rounds": num_rounds, "concurrency": concurrency}
    _run("trainer", recipe, output, **options, pause_s=pause_s, quiet_s=quiet_s, most_s=most_s)


def _run(name: str, recipe: str, output: Path | None, **options: Any) -> None:
    """Measure and report; RuntimeError if the report says that something is wrong."""
    settings = load_settings()
    folder = (output or settings.home / "bench" / f"{name}-{Path(recipe).stem}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    enter_home(folder / "home")
    from flows.bench.run import Run
    from flows.results import publish

    run = Run(name, recipe, folder, settings, options)
    benchmark = import_module(f"flows.bench.{name}")
    report = benchmark.measure(run, **options)
    typed = " ".join(["redraft", *sys.argv[1:]])
    publish(report, folder, benchmark.TITLE, benchmark.QUESTION, typed, run.setup)
    if report.failures:
        raise RuntimeError("; ".join(report.failures))
