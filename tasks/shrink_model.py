"""Give the target a smaller shape."""

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog
from models.checkpoints import invariants
from models.shrink import num_stored
from models.stages import Shrink
from tasks.stages.change_target import Changed, Start, change_target


@task(cache_policy=NO_CACHE)
def shrink_model(table: Shrink, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Make a smaller target; an artifact of kind "target"."""
    return change_target("shrink", table, seed, target, text, (num_stored,), partial(change, table, seed))


def change(table: Shrink, seed: int, start: Start) -> Changed:
    """Shrink; see `tasks.stages.change_target`."""
    before = num_stored(start.model)
    shrunk = catalog.load("shrink", table.method.name).shrink(
        start.model, start.documents, table.method, table.training, seed, start.work, start.on_progress
    )
    invariants.keep_zeroes(start.model, shrunk)
    return Changed(shrunk, {"parameters": num_stored(shrunk), "share_kept": num_stored(shrunk) / before})
