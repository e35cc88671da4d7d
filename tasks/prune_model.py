"""Zero weights of the target."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog, prune
from models.stages import Prune
from tasks.stages.change_target import Changed, Start, change_target


@task(cache_policy=NO_CACHE)
def prune_model(table: Prune, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Prune the linear layers of the decoder blocks; an artifact of kind "target"."""
    return change_target("prune", table, seed, target, text, (prune,), partial(change, table, seed))


def change(table: Prune, seed: int, start: Start) -> Changed:
    """Prune; see `tasks.stages.change_target`."""
    calibrated = catalog.load("prune", table.method.name).CALIBRATED
    documents = start.calibration(table.num_documents, table.max_length) if calibrated else []
    zeros = prune.prune_model(start.model, documents, table.method, table.pattern)
    return Changed(start.model, {"zeros": sum(zeros.values()) / len(zeros)})
