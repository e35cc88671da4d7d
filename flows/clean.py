"""Flow `clean`: what a home need not keep goes."""

from prefect import flow

from models.recipe import Recipe
from tasks.clean_home import clean_home


@flow(name="clean")
def clean(recipe: Recipe) -> int:
    """Remove what is beyond the recipe's limits, and return how much that was, in bytes."""
    return sum(item.num_bytes for item, _ in clean_home(recipe.keep, recipe.refresh.pool))
