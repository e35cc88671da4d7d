"""Bring a target into a plain Hugging Face directory, and later its reference outputs beside the weights."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from infra.artifacts import Artifact, open_artifact
from models import catalog
from models.core.evaluation.golden import GOLDEN_FILE
from models.params import BaseParams
from models.types import MANIFEST_NAME
from tasks.stages import cached_step, local_content, task


@task
def prepare_target(params: BaseParams) -> Artifact:
    """Build the target that `params` describe; an artifact of kind "target"."""
    method, tables = catalog.load("targets", params.name), list(_tables(params))
    told = params.model_dump(mode="json")
    for table in tables:
        told |= local_content(getattr(table, "path", ""))
        if template := local_content(getattr(table, "chat_template", "")):
            told["chat_template"] = template
    return cached_step("target", "target", told, lambda directory, _: method.build(params, directory))


def _tables(params: BaseParams) -> Iterator[BaseParams]:
    """Yield a target's table, and those of targets that it takes something from."""
    yield params
    for _, value in params:
        if isinstance(value, BaseParams):
            yield from _tables(value)


@task
def complete_target(target: Artifact, samples: Artifact) -> Artifact:
    """Add the reference outputs that came with the samples to the target's files; what is registered.

    The files are the target's own under another name, not copies.
    """

    def make(directory: Path, _: Path) -> None:
        files, own = open_artifact(target), shutil.ignore_patterns(MANIFEST_NAME, GOLDEN_FILE)
        shutil.copytree(files, directory, symlinks=True, ignore=own, copy_function=os.link, dirs_exist_ok=True)
        shutil.copy(open_artifact(samples) / GOLDEN_FILE, directory)

    return cached_step("complete_target", "target", {}, make, {"target": target, "samples": samples})
