"""Copies of the target and of the served draft's line, in a registry of a benchmark's own."""

import json
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.lines import ancestors
from infra.registry import Registry, open_registry
from infra.settings import Settings

COPIED = "copied.json"


class Served(BaseModel):
    """What a home's registry holds, numbered from 1.

    Attributes:
        originals: the numbers that the drafts have in the registry they were copied from, oldest first; the first was
            trained from nothing, the last is the champion.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    originals: tuple[int, ...]

    @property
    def champion(self) -> int:
        """The number of the champion's copy; that of the first draft is 1."""
        return len(self.originals)


def copy_served(source: Settings, home: Settings) -> Served:
    """Register copies of the champion target, the champion draft and the drafts that it descends from.

    A copy that was not finished is made anew.

    Raises:
        ValueError: nothing was built yet.
    """
    file = home.home / COPIED
    if file.is_file():
        return Served.model_validate_json(file.read_bytes())
    registry = open_registry(source)
    target, draft = registry.champion("target"), registry.champion("draft")
    if target is None or draft is None:
        raise ValueError("the registry has no champion target and draft yet; run: redraft build")
    line = ancestors(registry, draft)[::-1]
    fetched = home.home / "fetched"
    for path in (fetched, home.artifacts, home.cache):
        shutil.rmtree(path, ignore_errors=True)
    for path in home.home.glob("mlflow.db*"):
        path.unlink()
    copies = open_registry(home)
    copied = copies.register("target", registry.download(target, fetched), target.target.to_tags())
    copies.promote("target", copied.number)
    for number, version in enumerate(line, start=1):
        parent = number - 1 if number > 1 else None
        lineage = version.lineage.model_copy(update={"parent": parent, "target_version": copied.number})
        copies.register("draft", registry.download(version, fetched), lineage.to_tags())
        copies.promote("draft", number)
    shutil.rmtree(fetched)
    served = Served(originals=tuple(version.number for version in line))
    file.write_text(json.dumps(served.model_dump()) + "\n")
    return served


def register_again(registry: Registry, number: int, cache: Path) -> int:
    """Register a draft's files once more and return the new number: something to swap to where no other draft is."""
    version = registry.get("draft", number)
    return registry.register("draft", registry.download(version, cache), version.lineage.to_tags()).number
