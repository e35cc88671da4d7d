"""Store the target in fewer bits; it is what is served, so drafts are distilled for it."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog, quantize
from models.stages import Quantize
from tasks.prepare_text import first_of_each
from tasks.stages.change_target import Changed, Start, change_target, training_metrics


@task(cache_policy=NO_CACHE)
def quantize_target(table: Quantize, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Quantize the target; an artifact of kind "target" in a format that the engine serves."""
    method = catalog.load("quantize", table.method.name)

    def change(start: Start) -> Changed:
        trained = quantize.train_for(
            table.method, start.model, start.documents, table.training, seed, start.work, start.on_progress
        )
        documents = first_of_each(start.train, table.num_documents, table.max_length)
        quantized = method.quantize(start.model, documents, table.method)
        learnt = {} if trained is None else training_metrics(trained)
        metrics = {**learnt, **quantized.figures, "bytes": float(quantized.num_bytes)}
        losses = () if trained is None else trained.losses
        return Changed(quantized.model, metrics, losses, save=partial(quantize.save, quantized))

    code = (f"models.quantize.{table.method.name}",)
    return change_target("quantize", table, seed, target, text, code, change)
