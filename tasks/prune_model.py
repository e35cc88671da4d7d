"""Zero weights of the target."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import prune
from models.stages import Prune
from tasks.prepare_text import first_of_each
from tasks.stages.change_target import Changed, Start, change_target


@task(cache_policy=NO_CACHE)
def prune_model(table: Prune, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Prune the linear layers of the decoder blocks; an artifact of kind "target"."""

    def change(start: Start) -> Changed:
        documents = first_of_each(start.train, table.num_documents, table.max_length)
        zeros = prune.prune_model(start.model, documents, table.method, table.pattern)
        return Changed(start.model, {"zeros": sum(zeros.values()) / len(zeros)})

    return change_target("prune", table, seed, target, text, (f"models.prune.{table.method.name}",), change)
