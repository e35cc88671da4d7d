"""Make another target of a target: trained on text, of a smaller shape, with zeroes, finetuned, or in fewer bits.

A change works on a loaded target, see `tasks.stages.change_target`. What is finetuned is merged, because what is served
is a plain target; the small file by itself is kept with the run in MLflow. A pruned target's zeroes and a low rank are
put back after merging, because an adapter fills them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infra.artifacts import Artifact
from models import adapters, catalog, prune, quantize
from models.core.checkpoints import invariants, mixed
from models.core.learning import training
from models.core.learning.loop import Workers
from models.core.learning.second_task import SecondTask
from models.params import BaseParams
from models.shrink import num_stored
from models.stages import Finetune, Pretrain, Prune, Quantize, Shrink, Train
from models.types import Frozen
from tasks.stages import task
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task
def change_model(
    stage: str, table: Frozen, seed: int, target: Artifact, text: Artifact, workers: Train | None = None
) -> Artifact:
    """Make another target of one by a stage of the build and its table of the recipe; an artifact of kind "target"."""
    return change_target(stage, table, seed, target, text, CODE[stage], CHANGES[stage], workers)


def _pretrained(table: Pretrain, seed: int, start: Start) -> Changed:
    model, documents = start.model, start.documents

    def run(workers: Workers, work: Path, on_progress: training.OnProgress) -> training.Trained:
        settings, regimes = table.training, table.regimes
        return training.train_by_name(model, documents, settings, regimes, seed, work, on_progress, workers=workers)

    trained = start.run(model, run)
    return Changed(model, training_metrics(trained), trained.losses)


def _shrunk(table: Shrink, seed: int, start: Start) -> Changed:
    before = num_stored(start.model)
    method = catalog.load("shrink", table.method.name)
    loop = (start.work, start.on_progress) if getattr(method, "TRAINS", False) else ()
    shrunk = method.shrink(start.model, start.documents, table.method, table.training, seed, *loop)
    invariants.keep_zeroes(start.model, shrunk)
    return Changed(shrunk, {"parameters": num_stored(shrunk), "share_kept": num_stored(shrunk) / before})


def _pruned(table: Prune, seed: int, start: Start) -> Changed:
    calibrated = catalog.load("prune", table.method.name).CALIBRATED
    documents = start.calibration(table.num_documents, table.max_length) if calibrated else []
    zeros = prune.prune_model(start.model, documents, table.method, table.pattern)
    return Changed(start.model, {"zeros": sum(zeros.values()) / len(zeros)})


def _finetuned(table: Finetune, seed: int, start: Start) -> Changed:
    held, second = invariants.PreservedStructure(start.model), table.second
    adapted = adapters.attach(start.model, table.method, torch.Generator().manual_seed(seed))
    share = adapted.trained_share
    more = [] if second is None else [SecondTask(start.train[second.domain], second.weight, table.training, seed)]
    documents, settings = start.train[table.domain], table.training

    def run(workers: Workers, work: Path, on_progress: training.OnProgress) -> training.Trained:
        return training.train_by_name(
            adapted.model, documents, settings, table.regimes, seed, work, on_progress, more, workers
        )

    trained = start.run(adapted.model, run)
    adapters.save(adapted, start.work / "adapter")
    merged = adapters.merge(adapted)
    held.put_back(merged)
    metrics = {**training_metrics(trained), "trained_share": share}
    return Changed(merged, metrics, trained.losses, files=sorted((start.work / "adapter").iterdir()))


def _quantized(table: Quantize, seed: int, start: Start) -> Changed:
    with mixed.but(start.model, table.exceptions):
        trained = quantize.train_for(
            table.method, start.model, start.documents, table.training, seed, start.work, start.on_progress
        )
    methods = [table.method, *(form for form in table.exceptions.values() if isinstance(form, BaseParams))]
    calibrated = any(catalog.load("quantize", method.name).CALIBRATED for method in methods)
    documents = start.calibration(table.num_documents, table.max_length) if calibrated else []
    quantized = mixed.quantize(start.model, documents, table.method, table.exceptions)
    learnt = {} if trained is None else training_metrics(trained)
    metrics = {**learnt, **quantized.figures, "bytes": float(quantized.num_bytes)}
    losses = () if trained is None else trained.losses
    return Changed(quantized.model, metrics, losses, save=partial(quantize.save, quantized))


# In the order of the build: shapes come before zeros, which a smaller shape would tear out of their pattern, and few
# bits come last, because a draft learns from the target as it is served.
CHANGES: Mapping[str, Callable[[Any, int, Start], Changed]] = {
    "pretrain": _pretrained,
    "shrink": _shrunk,
    "prune": _pruned,
    "finetune": _finetuned,
    "quantize": _quantized,
}
# What computes them, besides the methods that their tables name.
CODE: Mapping[str, tuple[object, ...]] = {
    "pretrain": (training,),
    "shrink": (num_stored,),
    "prune": (prune,),
    "finetune": (training, SecondTask),
    "quantize": (mixed, quantize),
}
