"""Say before anything runs whether a recipe's parts go together, and whether its sources have enough prompts."""

from collections.abc import Callable
from typing import Any

from models import compatibility
from models.compatibility import Finding
from models.recipe import Recipe, Traffic
from models.targets import target_config
from tasks.promote import open_champions, require_target
from tasks.select_data import choose_prompts, select_data
from tasks.stages import task


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


@task
def configure_service(recipe: Recipe, orchestrator: str = "") -> dict[str, Any]:
    """Return what the service needs to know beside the settings (services/config.py).

    ValueError if the recipe's engine can't serve so, or as `open_champions`, `require_target` and `require_compatible`.
    """
    recipe.require_served()
    pair = open_champions.fn()
    require_target(recipe, pair.target)
    compatibility.require_compatible(recipe, target_config(pair.target_files.path))
    return {
        "target_dir": str(pair.target_files.path),
        "target_version": pair.target.number,
        "orchestrator": orchestrator,
        "engine": recipe.engine.model_dump(mode="json"),
        "serve": recipe.serve.model_dump(mode="json"),
    }
