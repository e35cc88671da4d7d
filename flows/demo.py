"""The demonstration: traffic changes, the draft falls behind, learns from the log, and is replaced while it serves."""

from typing import Any

from flows.build import build, make_target
from flows.refresh import refresh
from infra.artifacts import open_artifact
from infra.settings import Settings
from models.recipe import Recipe
from tasks.measure.demonstration import Stages, demonstrating
from tasks.stages.compiling import compiling

MOST_WINDOWS = 3  # of traffic; an undecided challenger learns on
GOES_ON = ("undecided", "nothing to do")  # the latter where a run was interrupted after the former


def demo(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Run the demonstration and return the figures that it prints as its last line.

    Raises:
        ValueError: the recipe has no [demo], or can't be built or served.
        RuntimeError: a request failed, nothing was promoted, the service did not take the new draft, or vLLM's own
            endpoint did not start.
    """
    if recipe.demo is None:
        raise ValueError(f"recipe {recipe.name} has no table [demo], which says what to send")
    stages = Stages()
    stages.start("build", "build: target, answers, first draft")
    with compiling(recipe, settings, open_artifact(make_target(recipe))):
        first = build(recipe)
    with demonstrating(recipe, recipe.demo, settings, first, stages) as run:
        if run.champion == first.number:  # else a run before this one has come further
            run.measure("before")
            run.change_traffic()
            with run.meanwhile():
                outcome, candidate = refresh(recipe)
                for window in range(2, MOST_WINDOWS + 1):
                    if outcome not in GOES_ON:
                        break
                    run.send_more(window, outcome)
                    outcome, candidate = refresh(recipe)
                run.follow(outcome, candidate)
        run.measure("after")
        run.time_in_turn()
        run.record_reference()
    run.time_stock()
    return run.report()
