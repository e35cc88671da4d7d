"""Train few parameters of the target on one domain, and merge them.

What is served is a plain target, so the adapter is merged; the small file by itself is kept with the run in MLflow. A
pruned target's zeroes and a low rank are put back after merging, because an adapter fills them.
"""

from functools import partial

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import adapters
from models.checkpoints.invariants import PreservedStructure
from models.learning import training
from models.learning.second_task import SecondTask
from models.stages import Finetune
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task(cache_policy=NO_CACHE)
def finetune_model(table: Finetune, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Finetune the target; an artifact of kind "target"."""
    code = (training, SecondTask)
    return change_target("finetune", table, seed, target, text, code, partial(change, table, seed))


def change(table: Finetune, seed: int, start: Start) -> Changed:
    """Finetune; see `tasks.stages.change_target`."""
    held = PreservedStructure(start.model)
    adapted = adapters.attach(start.model, table.method, torch.Generator().manual_seed(seed))
    share = adapted.trained_share
    second = table.second
    more = [] if second is None else [SecondTask(start.train[second.domain], second.weight, table.training, seed)]
    trained = training.train_by_name(
        adapted.model,
        start.train[table.domain],
        table.training,
        table.regimes,
        seed,
        start.work,
        start.on_progress,
        more,
    )
    adapters.save(adapted, start.work / "adapter")
    merged = adapters.merge(adapted)
    held.put_back(merged)
    metrics = {**training_metrics(trained), "trained_share": share}
    return Changed(merged, metrics, trained.losses, files=sorted((start.work / "adapter").iterdir()))
