"""Take a draft that was trained elsewhere, in any layout that its family reads, and save it as those made here are."""

import hashlib
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact
from infra.manifest import canonical_json, file_sha256
from models import catalog
from models.params import Frozen
from tasks.recipe import Recipe
from tasks.stages import produce

READ = ("config.json", "tokenizer.json", "*.safetensors")


class Adopted(Frozen):
    """A draft from elsewhere: as it is served, and where it came from.

    Attributes:
        draft: kind "draft", as the engine loads it.
        source: the directory that was read.
        source_sha256: of the files in it that count.
    """

    draft: Artifact
    source: str
    source_sha256: str

    def tags(self) -> dict[str, str]:
        """Return what its lineage has instead of a parent."""
        return {"source": self.source, "source_sha256": self.source_sha256}


@task(cache_policy=NO_CACHE)
def adopt_draft(recipe: Recipe, target: Artifact, source: Path) -> Adopted:
    """Check a published draft against the target and convert it.

    Args:
        recipe: its draft's method says who reads it.
        target: what it is to draft for.
        source: its directory.

    Raises:
        ValueError: the method has no published drafts, or this one does not fit; names what does not.
    """
    method = catalog.load("drafts", recipe.draft.name)
    if not hasattr(method, "adopt"):
        families = [name for name in catalog.names("drafts") if hasattr(catalog.load("drafts", name), "adopt")]
        raise ValueError(
            f'drafts of method "{recipe.draft.name}" can\'t be imported; set the draft to: {", ".join(families)}'
        )
    sha256 = _digest(source)
    draft = produce(
        stage="adopted",
        kind="draft",
        params={"source_sha256": sha256},
        inputs={"target": target},
        code=(__name__, f"models.drafts.{recipe.draft.name}"),
        make=lambda directory, _: method.save(method.adopt(source, open_artifact(target)), directory),
    )
    return Adopted(draft=draft, source=str(source), source_sha256=sha256)


def _digest(directory: Path) -> str:
    """Hash the files that an import reads; hub caches hold links to them, which a manifest refuses."""
    files = sorted(file for pattern in READ for file in directory.glob(pattern))
    return hashlib.sha256(canonical_json({file.name: file_sha256(file) for file in files})).hexdigest()
