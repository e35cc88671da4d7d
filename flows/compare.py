"""`redraft compare FAMILY`: every method of a family on one target and one text, against a baseline, over seeds."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.command import NONE, Output, RecipeName, open_settings
from models.recipe import DEFAULT_RECIPE, load_recipe
from tasks.measure.comparisons import families, load_comparison

MOST_SEEDS = 12


def compare(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=f"One of: {', '.join(families()) or 'none'}.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    budget: Annotated[
        float, typer.Option(min=0.001, help="Scales how much is trained or calibrated; 1 takes minutes per family.")
    ] = 1.0,
    num_seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds; fewer than 3 say little.")] = 3,
    output: Output = None,
    only: Annotated[
        list[str],
        typer.Option(help='Measure the baseline and rows of this name alone, such as "gptq*"; give it once for each.'),
    ] = NONE,
    fit: Annotated[
        str | None,
        typer.Option(
            help='Of FAMILY "all": bounds such as "110 MiB, KL 0.1"; prints the fastest that fits as a recipe.'
        ),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(
            help='A column and what makes no difference, such as "kl 0.05": adds seeds until rows are decided.'
        ),
    ] = None,
    most_seeds: Annotated[
        int | None, typer.Option("--max-seeds", min=1, help="How many seeds a row gets under a margin; by default 12.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Measure so many cells at once, where none is timed; more than 1 blurs seconds.")
    ] = 1,
) -> None:
    """Measure every method of a family on a recipe's target and text. Finished cells are reused.

    Example: redraft compare all --fit "110 MiB, KL 0.1"
    """
    settings, comparison = open_settings(), load_comparison(family)
    from infra.views.comparison import comparison_report, draw_tradeoffs
    from infra.views.results import publish
    from tasks.measure.compare_methods import compare_methods, parse_margin
    from tasks.measure.fit import fitted, parse_bounds

    if fit is not None and not hasattr(comparison, "BOUNDS"):
        raise ValueError(f'--fit chooses a target to serve, of "redraft compare all"; {family} measures none')
    bounds = None if fit is None else parse_bounds(fit, comparison.BOUNDS)
    if margin is None and most_seeds is not None:
        raise ValueError(f"--max-seeds {most_seeds} is for rows under a --margin, and none is given; see --seeds")
    within = None if margin is None else parse_margin(margin, most_seeds or MOST_SEEDS)
    parsed = load_recipe(recipe)
    folder = (output or settings.home / "compare" / f"{family}-{Path(recipe).stem}").absolute()
    found, setup = compare_methods(family, comparison, parsed, folder, budget, num_seeds, within, only, jobs)
    report = comparison_report(found, folder / "compare.png")
    if hasattr(comparison, "DRAWN"):
        draw_tradeoffs(found.figures, found.headings, "kl", comparison.DRAWN, folder / "compare.png")
    if hasattr(comparison, "claims"):
        report = comparison.claims(report, found)
    if bounds is not None:
        report = fitted(report, found, comparison, bounds, parsed, budget)
    publish(report, folder, f"compare {family}", found.question, shlex.join(["redraft", *sys.argv[1:]]), setup)
