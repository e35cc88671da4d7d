"""Say before anything runs whether a recipe's parts go together, and whether its sources have enough prompts."""

from collections.abc import Callable

from models import compatibility
from models.compatibility import Finding
from models.recipe import Recipe, Traffic
from tasks.select_data import choose_prompts, select_data
from tasks.stages.task import task


@task
def check_recipe(recipe: Recipe) -> list[Finding]:
    """Return what is found of the target, its chat template, draft and engine, and of each domain's prompts."""

    def prompts_of(domain: str, traffic: Traffic) -> Callable[[], str]:
        def look() -> str:
            parts = choose_prompts(domain, traffic, recipe.seed)
            return ", ".join(f"{len(chosen)} for {part}" for part, chosen in parts.items())

        return look

    prompts = [compatibility.found(f"traffic.{one}", prompts_of(one, table)) for one, table in recipe.traffic.items()]
    return [*compatibility.findings(recipe), *prompts]


@task
def require_buildable(recipe: Recipe) -> None:
    """Raise ValueError with all that is wrong with a recipe's models, or with the prompts, which are chosen by it."""
    if faults := [one.found for one in compatibility.findings(recipe) if not one.ok]:
        raise ValueError("\n".join(faults))
    select_data.fn(recipe.traffic, recipe.seed)
