"""Bring a target into a plain Hugging Face directory."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact
from models import catalog
from models.params import BaseParams
from tasks.stages import produce


@task(cache_policy=NO_CACHE)
def prepare_target(params: BaseParams) -> Artifact:
    """Build the target that `params` describe; an artifact of kind "target"."""
    method = catalog.load("targets", params.name)
    return produce(
        stage="target",
        kind="target",
        params=params.model_dump(mode="json"),
        inputs={},
        code=(__name__, f"models.targets.{params.name}"),
        make=lambda directory, _: method.build(params, directory),
    )
