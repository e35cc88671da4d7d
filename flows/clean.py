"""Flows `clean` and `retain`: what a home need not keep goes, and what was served is kept for so many days."""

from prefect import flow

from models.recipe import Recipe
from tasks.clean_home import clean_home, retain_rows


@flow(name="clean")
def clean(recipe: Recipe) -> int:
    """Remove what is beyond the recipe's limits, and return how much that was, in bytes."""
    return sum(item.num_bytes for item, _ in clean_home(recipe.keep, recipe.refresh.pool))


@flow(name="retain")
def retain(recipe: Recipe) -> int:
    """Erase what the recipe says is too old, and return how many rows that were."""
    days = recipe.schedule.retain_days
    return 0 if days is None else retain_rows(days).rows
