"""Take a draft that was trained elsewhere, in any layout that its family reads, and save it as those made here are."""

import hashlib
from pathlib import Path
from typing import Any, cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact
from infra.manifest import canonical_json, file_sha256
from models.drafting.draft_families import adopter_of, name_of
from models.params import Frozen
from tasks.stages import produce

READ = ("config.json", "tokenizer.json", "*.safetensors")


class Adopted(Frozen):
    """A draft from elsewhere: as it is served, and where it came from.

    Attributes:
        draft: kind "draft", as the engine loads it.
        source: the directory that was read.
        source_sha256: of the files in it that count.
        num_layers: how many of its first layers were taken, None for all that it is.
    """

    draft: Artifact
    source: str
    source_sha256: str
    num_layers: int | None = None


@task(cache_policy=NO_CACHE)
def adopt_draft(target: Artifact, source: Path, num_layers: int | None = None) -> Adopted:
    """Check a published draft against the target and convert it.

    Args:
        target: what it is to draft for.
        source: its directory; its layout says which family reads it.
        num_layers: of a draft in which others are nested, the one to take: that of so many first layers.

    Raises:
        ValueError: no family reads its layout, it does not fit, or no such draft is nested in it; names what is wrong.
    """
    family = adopter_of(source)
    if num_layers is not None and not hasattr(family, "cut"):
        raise ValueError(f"--layers is for drafts in which others are nested, and those of {name_of(family)} have none")
    sha256 = _digest(source)

    def make(directory: Path, _: Path) -> None:
        draft = family.adopt(source, open_artifact(target))
        family.save(draft if num_layers is None else cast("Any", family).cut(draft, num_layers), directory)

    draft = produce(
        stage="adopted",
        kind="draft",
        params={"source_sha256": sha256, **({} if num_layers is None else {"num_layers": num_layers})},
        inputs={"target": target},
        code=(__name__, f"models.drafts.{name_of(family)}"),
        make=make,
    )
    return Adopted(draft=draft, source=str(source), source_sha256=sha256, num_layers=num_layers)


def _digest(directory: Path) -> str:
    """Hash the files that an import reads; hub caches hold links to them, which a manifest refuses."""
    files = sorted(file for pattern in READ for file in directory.glob(pattern))
    return hashlib.sha256(canonical_json({file.name: file_sha256(file) for file in files})).hexdigest()
