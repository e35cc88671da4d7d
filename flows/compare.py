"""`redraft compare FAMILY`: every method of a family on one target and one text, against a baseline, over seeds."""

from pathlib import Path
from typing import Any

from infra.settings import Settings
from models.recipe import load_recipe
from tasks.measure.find_comparison import load_comparison


def compare(
    family: str,
    recipe_name: str,
    settings: Settings,
    budget: float,
    num_seeds: int,
    output: Path | None,
    typed: str,
) -> dict[str, Any]:
    """Measure what is missing and report; returns what `result.json` holds.

    Args:
        family: names the comparison.
        recipe_name: its target and its text are used.
        settings: say where everything lies.
        budget: how much is trained or calibrated.
        num_seeds: the seeds are 0, 1, ….
        output: where cells and report lie; None takes a folder below the home.
        typed: the command to repeat it.

    Raises:
        ValueError: there is no such comparison or recipe, the recipe has no text, cells are of another setup.
    """
    comparison = load_comparison(family)
    from infra.views.comparison import comparison_report
    from infra.views.results import publish
    from tasks.measure.compare_methods import compare_methods

    folder = (output or settings.home / "compare" / f"{family}-{Path(recipe_name).stem}").absolute()
    found, setup = compare_methods(family, comparison, load_recipe(recipe_name), folder, budget, num_seeds)
    report = comparison_report(found, folder / "compare.png")
    return publish(report, folder, f"compare {family}", found.question, typed, setup)
