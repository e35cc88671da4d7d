"""Take a draft that was trained elsewhere, in any layout that its family reads, and save it as those made here are."""

import hashlib
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact
from infra.manifest import canonical_json, file_sha256
from models.drafts import adopter_of, name_of
from models.params import Frozen
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


@task(cache_policy=NO_CACHE)
def adopt_draft(target: Artifact, source: Path) -> Adopted:
    """Check a published draft against the target and convert it.

    Args:
        target: what it is to draft for.
        source: its directory; its layout says which family reads it.

    Raises:
        ValueError: no family reads its layout, or it does not fit; names what does not.
    """
    family = adopter_of(source)
    sha256 = _digest(source)
    draft = produce(
        stage="adopted",
        kind="draft",
        params={"source_sha256": sha256},
        inputs={"target": target},
        code=(__name__, f"models.drafts.{name_of(family)}"),
        make=lambda directory, _: family.save(family.adopt(source, open_artifact(target)), directory),
    )
    return Adopted(draft=draft, source=str(source), source_sha256=sha256)


def _digest(directory: Path) -> str:
    """Hash the files that an import reads; hub caches hold links to them, which a manifest refuses."""
    files = sorted(file for pattern in READ for file in directory.glob(pattern))
    return hashlib.sha256(canonical_json({file.name: file_sha256(file) for file in files})).hexdigest()
