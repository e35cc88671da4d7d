"""Versions in the registry: what MLflow tells of one, and whether it may be served."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from infra.artifacts import Artifact
from infra.lineage import Lineage, Target
from models.types import Frozen

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

Kind = Literal["target", "draft"]

SHA256 = r"^[0-9a-f]{64}$"
CLEANED = "cleaned"
OWN_TAGS = ("sha256", "model_id", "previous", "quarantined", "forced", CLEANED)


class ForeignVersion(ValueError):
    """A version that somebody made or changed by hand: what is known of it can't be trusted, so it is not served."""


class Version(Frozen):
    """One registered directory; `sha256` is the digest of its manifest.

    Tags are parsed when they are asked for, so that a version that somebody damaged by hand can still be quarantined.
    """

    kind: Kind
    number: int = Field(ge=1)
    sha256: str = Field(pattern=SHA256)
    tags: dict[str, str]
    created_ms: int

    @cached_property
    def target(self) -> Target:
        """What the target is, or the one that the draft was made for."""
        with self._read():
            return Target.from_tags(self.tags)

    @cached_property
    def lineage(self) -> Lineage:
        with self._read():
            return Lineage.from_tags(self.tags)

    @property
    def previous(self) -> int | None:
        number = self.tags.get("previous", "")
        if not number.isdecimal() and number:
            raise ForeignVersion(f"{self.kind} {self.number}: tag previous is {number!r}, wanted a version's number")
        return int(number) if number else None

    @property
    def was_champion(self) -> bool:
        return "previous" in self.tags

    @property
    def quarantined(self) -> str:
        """Why it must never be served, "" if it may."""
        return self.tags.get("quarantined", "")

    @property
    def forced(self) -> str:
        """Why it was promoted against its gate, "" if it was not."""
        return self.tags.get("forced", "")

    @property
    def cleaned(self) -> str:
        """When its files were removed, "" while they are there (infra/clean.py)."""
        return self.tags.get(CLEANED, "")

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ForeignVersion(f"{self.kind} {self.number}: {error}") from error


class Pair(Frozen):
    target: Version
    draft: Version
    target_files: Artifact
    draft_files: Artifact


def as_version(version: "ModelVersion") -> Version:
    """Return what MLflow tells of a version; ForeignVersion if it was made or changed by hand."""
    sha256 = version.tags.get("sha256")
    if sha256 is None:
        raise ForeignVersion(f"{version.name} {version.version} was not registered by redraft: it has no tag sha256")
    if re.fullmatch(SHA256, sha256) is None:
        raise ForeignVersion(f"{version.name} {version.version}: tag sha256 is {sha256[:60]!r}, wanted a digest")
    return Version(
        kind=version.name,
        number=int(version.version),
        sha256=sha256,
        tags=version.tags,
        created_ms=version.creation_timestamp,
    )


def cached(version: Version, cache: Path) -> Path:
    return cache / version.kind / f"{version.number}-{version.sha256[:12]}"


def is_quarantined(version: Version) -> bool:
    return "quarantined" in version.tags


def is_usable(version: Version) -> bool:
    return not is_quarantined(version) and not version.cleaned


def same_files(versions: Sequence[Version], artifact: Artifact) -> list[Version]:
    """Return the versions that hold an artifact's files and may be served, in the order given."""
    return [one for one in versions if one.sha256 == artifact.sha256 and is_usable(one)]
