"""Train few parameters of the target on one domain, and merge them.

What is served is a plain target, so the adapter is merged; the small file by itself is kept with the run in MLflow. Of
a pruned target the zeros are put back after merging, because an adapter fills them.
"""

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import adapters, training
from models.layers.linears import put_zeros, zeros
from models.stages import Finetune
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task(cache_policy=NO_CACHE)
def finetune_model(table: Finetune, seed: int, target: Artifact, text: Artifact, keep_zeros: bool = False) -> Artifact:
    """Finetune the target; an artifact of kind "target", whose zeros are those of `target` if they are to be kept."""

    def change(start: Start) -> Changed:
        pruned = zeros(start.model) if keep_zeros else None
        adapted = adapters.attach(start.model, table.method, torch.Generator().manual_seed(seed))
        share = adapted.trained_share
        trained = training.train_by_name(
            adapted.model,
            start.train[table.domain],
            table.training,
            table.regimes,
            seed,
            start.work,
            start.on_progress,
        )
        adapters.save(adapted, start.work / "adapter")
        merged = adapters.merge(adapted)
        if pruned is not None:
            put_zeros(merged, pruned)
        metrics = {**training_metrics(trained), "trained_share": share}
        return Changed(merged, metrics, trained.losses, files=sorted((start.work / "adapter").iterdir()))

    code = (
        "models.training",
        f"models.adapters.{table.method.name}",
        *(f"models.regimes.{regime.name}" for regime in table.regimes),
    )
    return change_target("finetune", table, seed, target, text, code, change)
