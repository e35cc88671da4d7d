"""Commands `redraft bench …` and `redraft advise`. Finished cells are reused, so an interrupted one continues."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from flows.command import NONE, Output, RecipeName, command_of
from infra.environment import enter_home
from infra.home import open_home
from infra.settings import load_settings
from models.recipe import DEFAULT_RECIPE, load_recipe

bench = typer.Typer(name="bench", help="Measure a recipe's service, in a home of its own.", no_args_is_help=True)
command = command_of(bench)

NumPrompts = Annotated[int, typer.Option("--prompts", min=1, help="Held-out prompts per domain.")]
NumRounds = Annotated[int, typer.Option("--rounds", min=1, help="How many times the compared ways take turns.")]
STREAMS = [1, 2, 4, 8, 16, 32, 64]
DRAFTS = ["bad", "first", "champion"]
GREEDY = [0.0]
NO_LIMITS: Mapping[str, float] = MappingProxyType({})
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]


@command
def speed(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 100,
    num_rounds: NumRounds = 4,
    baselines: Annotated[
        list[str],
        typer.Option("--baseline", help="Measure this baseline besides plain vLLM; repeatable. All if left out."),
    ] = NONE,
) -> None:
    """Tokens/s and latency at one stream, compared with vLLM's own compiled endpoint, transformers, our reference.

    Example: redraft bench speed --prompts 16 --rounds 1 --baseline "vLLM with ngram"
    """
    run_benchmark("speed", recipe, output, num_prompts=num_prompts, num_rounds=num_rounds, baselines=baselines)


@command
def load(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="Held-out prompts per domain and block, or two for each stream.")
    ] = 16,
    streams: Annotated[
        list[int], typer.Option("--streams", min=1, help="Requests at once; give it once for each number.")
    ] = STREAMS,
    drafts: Annotated[
        list[str], typer.Option("--draft", help="Drafts to measure, such as bad; give it once for each.")
    ] = DRAFTS,
    num_pairs: Annotated[int, typer.Option("--pairs", min=1, help="How often on and off take turns.")] = 4,
    baselines: Annotated[
        list[str],
        typer.Option("--baseline", help='Measure vLLM\'s own endpoint too, as vLLM or "vLLM with ngram"; repeatable.'),
    ] = NONE,
) -> None:
    """Throughput and latency with speculation on and off, at 1 to 64 streams, with three drafts.

    Example: redraft bench load --streams 1 --streams 16 --draft champion --pairs 2 --baseline vLLM
    """
    options = {"num_prompts": num_prompts, "streams": sorted(set(streams)), "drafts": drafts, "num_pairs": num_pairs}
    run_benchmark("load", recipe, output, **options, baselines=baselines)


@command
def swap(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    num_prompts: NumPrompts = 16,
    num_swaps: Annotated[int, typer.Option("--swaps", min=1, help="How many swaps.")] = 20,
    per_cell: Annotated[int, typer.Option(min=1, help="Swaps per cell, which is measured and kept as a whole.")] = 5,
    concurrency: Concurrency = 4,
) -> None:
    """Failures and stalls near a swap under load, compared with no swap and with a restart.

    Example: redraft bench swap --swaps 10
    """
    options = {"num_prompts": num_prompts, "num_swaps": num_swaps, "per_cell": per_cell, "concurrency": concurrency}
    run_benchmark("swap", recipe, output, **options)


@command
def drift(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    data: Annotated[
        str, typer.Option(metavar="DOMAIN=FILE", help="The domain that traffic shifts to, as source dataset reads it.")
    ] = "",
    num_requests: Annotated[int, typer.Option("--requests", min=8, help="Requests per window.")] = 100,
    num_windows: Annotated[
        int, typer.Option("--windows", min=1, help="Windows of the domain that traffic shifts to.")
    ] = 4,
    num_back: Annotated[int, typer.Option("--back", min=1, help="Windows of the domain that returns.")] = 1,
    num_prompts: NumPrompts = 100,
) -> None:
    """How soon a draft follows a shift of traffic, and what it forgets, compared with other ways to follow.

    Example: redraft bench drift --data math=gsm8k.jsonl
    """
    options = {"num_requests": num_requests, "num_windows": num_windows, "num_back": num_back}
    run_benchmark("drift", recipe, output, **options, num_prompts=num_prompts, data=data)


@command
def specbench(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Questions with id, domain and messages, as Spec-Bench's; by default the recipe's held-out prompts.",
        ),
    ] = None,
    configurations: Annotated[
        Path | None,
        typer.Option(
            help="TOML file, a table for each way of drafting; by default every family with --train, else what needs "
            "no training."
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            "--train",
            min=0.0,
            help="Make drafts first, each trained for so many minutes at most on what the first draft learnt; 0 for "
            "none.",
        ),
    ] = 0.0,
    temperatures: Annotated[
        list[float], typer.Option("--temperature", min=0.0, help="0 is greedy; give it once for each.")
    ] = GREEDY,
    per_task: Annotated[int, typer.Option(min=0, help="Questions of each task, 0 for all.")] = 0,
    per_cell: Annotated[int, typer.Option(min=1, help="Questions that are measured and kept as a whole.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens of an answer, at most.")] = 128,
) -> None:
    """Ways of drafting in the reference engine, compared with plain decoding, task by task.

    Example: redraft bench specbench --data spec_bench.jsonl --train 5 --temperature 0 --temperature 1 --per-task 10
    """
    options: dict[str, Any] = {"data": data, "configurations": configurations, "minutes": minutes}
    options |= {"per_task": per_task, "per_cell": per_cell, "max_tokens": max_tokens}
    run_benchmark("specbench", recipe, output, **options, temperatures=sorted(set(temperatures)))


def advise(
    recipe: RecipeName = DEFAULT_RECIPE,
    output: Output = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your traffic, as Spec-Bench's questions: id, domain, messages.")
    ] = None,
    per_domain: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each domain.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 64,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Times of another machine, such as a GPU's, as costs.json has them.")
    ] = None,
    limit_minutes: Annotated[
        float, typer.Option("--minutes", min=0.0, help="When to end with what it knows; 0 for all prompts.")
    ] = 5.0,
) -> None:
    """Say which way of drafting fits the target, the traffic and this machine, and measure the best three.

    It ends after five minutes with what it knows then. The same command goes on from there.

    Example: redraft advise --minutes 10
    """
    options = {"data": data, "costs": costs, "per_domain": per_domain, "max_tokens": max_tokens}
    run_benchmark("advise", recipe, output, {"limit_minutes": limit_minutes}, **options)


def run_benchmark(
    name: str, recipe: str, output: Path | None, limits: Mapping[str, float] = NO_LIMITS, /, **options: Any
) -> None:
    """Measure and report; what is measured depends on the options, and not on the limits.

    RuntimeError if the report says that something is wrong.
    """
    options = {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in options.items()}
    settings = load_settings()
    open_home(settings)
    folder = (output or settings.home / "bench" / f"{name}-{Path(recipe).stem}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    enter_home(folder / "home")
    from infra.views.results import publish
    from tasks.measure.run import Run

    run = Run(name, load_recipe(recipe), recipe, folder, settings, options, (sys.executable, "-m", "flows.cli"))
    benchmark = import_module(f"tasks.measure.{name}")
    report = benchmark.measure(run, **options, **limits)
    publish(report, folder, name, benchmark.QUESTION, " ".join(["redraft", *sys.argv[1:]]), run.setup)
    if report.failures:
        raise RuntimeError("; ".join(report.failures))
