"""Say what a service is to serve: the champions, as a recipe wants them served."""

from collections.abc import Mapping
from typing import Any

from infra.client import SERVED_NAME
from infra.keys import keys_path
from infra.settings import load_settings
from models.recipe import Recipe
from tasks.promote import open_champions, require_target
from tasks.stages.task import task


@task
def configure_service(
    recipe: Recipe, orchestrator: str = "", changed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the service needs to know (services/config.py).

    Args:
        recipe: what is served, and how.
        orchestrator: a Prefect API or "".
        changed: keys that differ from what the recipe says.

    Raises:
        ValueError: the recipe's engine can't serve so, nothing was built yet, or the champion was made by another
            recipe's target.
    """
    recipe.require_served()
    settings, pair = load_settings(), open_champions.fn()
    require_target(recipe, pair.target)
    return {
        "target_dir": str(pair.target_files.path),
        "target_version": pair.target.number,
        "engine": recipe.engine.model_dump(mode="json"),
        "mlflow_uri": settings.mlflow_uri,
        "mlflow_files": str(settings.mlflow_files),
        "querylog": str(settings.querylog),
        "cache": str(settings.cache),
        "state": str(settings.home / "service-state.json"),
        "host": settings.host,
        "port": recipe.serve.port,
        "keys": str(keys_path(settings)),
        "served_name": SERVED_NAME,
        "orchestrator": orchestrator,
        "serve": recipe.serve.model_dump(mode="json", exclude={"port"}),
        **(changed or {}),
    }
