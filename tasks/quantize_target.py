"""Store the target in fewer bits; it is what is served, so drafts are distilled for it."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog, quantize
from models.checkpoints import mixed
from models.params import BaseParams
from models.stages import Quantize
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task(cache_policy=NO_CACHE)
def quantize_target(table: Quantize, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Quantize the target; an artifact of kind "target" in a format that the engine serves."""
    code = (mixed, quantize)
    return change_target("quantize", table, seed, target, text, code, partial(change, table, seed))


def change(table: Quantize, seed: int, start: Start) -> Changed:
    """Quantize; see `tasks.stages.change_target`."""
    with mixed.but(start.model, table.exceptions):
        trained = quantize.train_for(
            table.method, start.model, start.documents, table.training, seed, start.work, start.on_progress
        )
    calibrated = any(catalog.load("quantize", method.name).CALIBRATED for method in _methods(table))
    documents = start.calibration(table.num_documents, table.max_length) if calibrated else []
    quantized = mixed.quantize(start.model, documents, table.method, table.exceptions)
    learnt = {} if trained is None else training_metrics(trained)
    metrics = {**learnt, **quantized.figures, "bytes": float(quantized.num_bytes)}
    losses = () if trained is None else trained.losses
    return Changed(quantized.model, metrics, losses, save=partial(quantize.save, quantized))


def _methods(table: Quantize) -> list[BaseParams]:
    return [table.method, *(form for form in table.exceptions.values() if isinstance(form, BaseParams))]
