"""`redraft compare FAMILY`: every method of a family on one target and one text, against a baseline, over seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.settings import Settings
from models.recipe import load_recipe
from tasks.measure.comparisons import load_comparison

MOST_SEEDS = 12


def compare(
    family: str,
    recipe_name: str,
    settings: Settings,
    budget: float,
    num_seeds: int,
    output: Path | None,
    typed: str,
    wanted: str | None = None,
    margin: str | None = None,
    most_seeds: int | None = None,
    only: Sequence[str] = (),
    num_jobs: int = 1,
) -> dict[str, Any]:
    """Measure what is missing and report; returns what `result.json` holds. Options are those of the command.

    `typed` is the command to repeat it. `margin` is read as `tasks.measure.decide` says.

    Raises:
        ValueError: there is no such comparison or recipe, the recipe has no text, cells are of another setup, bounds or
            margin can't be read, or there are most seeds and no margin.
    """
    comparison = load_comparison(family)
    from infra.views.comparison import comparison_report, draw_tradeoffs
    from infra.views.results import publish
    from tasks.measure.compare_methods import compare_methods
    from tasks.measure.decide import parse_margin
    from tasks.measure.fit import fitted, parse_bounds

    if wanted is not None and not hasattr(comparison, "BOUNDS"):
        raise ValueError(f'--fit chooses a target to serve, of "redraft compare all"; {family} measures none')
    bounds = None if wanted is None else parse_bounds(wanted, comparison.BOUNDS)
    if margin is None and most_seeds is not None:
        raise ValueError(f"--max-seeds {most_seeds} is for rows under a --margin, and none is given; see --seeds")
    within = None if margin is None else parse_margin(margin, most_seeds or MOST_SEEDS)
    recipe = load_recipe(recipe_name)
    folder = (output or settings.home / "compare" / f"{family}-{Path(recipe_name).stem}").absolute()
    found, setup = compare_methods(family, comparison, recipe, folder, budget, num_seeds, within, only, num_jobs)
    report = comparison_report(found, folder / "compare.png")
    if hasattr(comparison, "DRAWN"):
        draw_tradeoffs(found.figures, found.headings, "kl", comparison.DRAWN, folder / "compare.png")
    if hasattr(comparison, "claims"):
        report = comparison.claims(report, found)
    if bounds is not None:
        report = fitted(report, found, comparison, bounds, recipe, budget)
    return publish(report, folder, f"compare {family}", found.question, typed, setup)
