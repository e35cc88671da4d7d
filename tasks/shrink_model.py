"""Give the target a smaller shape."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog
from models.stages import Shrink
from tasks.stages.change_target import Changed, Start, change_target


@task(cache_policy=NO_CACHE)
def shrink_model(table: Shrink, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Make a smaller target; an artifact of kind "target"."""
    method = catalog.load("shrink", table.method.name)

    def change(start: Start) -> Changed:
        before = start.model.num_parameters()
        shrunk = method.shrink(
            start.model, start.documents, table.method, table.training, seed, start.work, start.on_progress
        )
        return Changed(shrunk, {"parameters": shrunk.num_parameters(), "share_kept": shrunk.num_parameters() / before})

    return change_target("shrink", table, seed, target, text, (f"models.shrink.{table.method.name}",), change)
