"""Say what a service is to serve: the champions, as a recipe wants them served."""

from typing import Any

from models.recipe import Recipe
from tasks.promote import open_champions, require_target
from tasks.stages.task import task


@task
def configure_service(recipe: Recipe, orchestrator: str = "") -> dict[str, Any]:
    """Return what the service needs to know beside the settings (services/config.py).

    Raises:
        ValueError: the recipe's engine can't serve so, nothing was built yet, or the champion was made by another
            recipe's target.
    """
    recipe.require_served()
    pair = open_champions.fn()
    require_target(recipe, pair.target)
    return {
        "target_dir": str(pair.target_files.path),
        "target_version": pair.target.number,
        "orchestrator": orchestrator,
        "engine": recipe.engine.model_dump(mode="json"),
        "serve": recipe.serve.model_dump(mode="json"),
    }
