"""Train the target on text, as the recipe's regimes say."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models.learning import training
from models.stages import Pretrain
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task(cache_policy=NO_CACHE)
def pretrain_model(table: Pretrain, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Train all of the target's weights; an artifact of kind "target"."""
    return change_target("pretrain", table, seed, target, text, (training,), partial(change, table, seed))


def change(table: Pretrain, seed: int, start: Start) -> Changed:
    """Train; see `tasks.stages.change_target`."""
    trained = training.train_by_name(
        start.model, start.documents, table.training, table.regimes, seed, start.work, start.on_progress
    )
    return Changed(start.model, training_metrics(trained), trained.losses)
