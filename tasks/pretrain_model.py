"""Train the target on text, as the recipe's regimes say."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import training
from tasks.change_target import Changed, Start, change_target, training_metrics
from tasks.recipe import Recipe


@task(cache_policy=NO_CACHE)
def pretrain_model(recipe: Recipe, target: Artifact, text: Artifact) -> Artifact:
    """Train all of the target's weights; an artifact of kind "target"."""
    table = recipe.pretrain

    def change(start: Start) -> Changed:
        trained = training.train_by_name(
            start.model, start.documents, table.training, table.regimes, recipe.seed, start.work, start.on_progress
        )
        return Changed(start.model, training_metrics(trained), trained.losses)

    code = ("models.training", *(f"models.regimes.{regime.name}" for regime in table.regimes))
    return change_target("pretrain", table, recipe.seed, target, text, code, change)
