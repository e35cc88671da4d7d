"""Flow `retain`: what was served is kept for so many days and no longer."""

from prefect import flow

from models.recipe import Recipe
from tasks.retain_rows import retain_rows


@flow(name="retain")
def retain(recipe: Recipe) -> int:
    """Erase what the recipe says is too old, and return how many rows that were."""
    days = recipe.schedule.retain_days
    return 0 if days is None else retain_rows(days).rows
