"""Directories that appear whole or not at all, and the references to them that tasks pass on.

A directory is made under a staging name beside its final one and renamed when it is complete. Renaming cannot replace
a directory that has files in it, so an older one is first renamed aside; `sweep_staging` puts it back if the process
died between the two renames.

Who makes a directory holds a lock on it, so a sweep knows what is alive without process ids. The parent's lock covers
the moments in which a directory is not locked yet or has no final name.
"""

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import Field

from infra.files import flush
from infra.locks import lock_folder
from infra.manifest import check_manifest, write_manifest
from models.types import Frozen

LEFTOVER = re.compile(r"\.(?P<role>staging|aside)-(?P<name>.+)-[0-9a-f]{16}")


class Artifact(Frozen):
    """A reference to a directory with a manifest: where it lies, its digest, and what it is ("target", "rows", ...)."""

    uri: str = Field(pattern=r"^file:///")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    kind: str = Field(min_length=1)

    @property
    def path(self) -> Path:
        return path_of(self.uri)


def path_of(uri: str) -> Path:
    """Return the path of a file's address."""
    return Path(unquote(urlsplit(uri).path))


@contextmanager
def renamed_when_complete(final: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `final`, flushed, when the block ends, which answers for the manifest."""
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep_staging(final.parent)
    staging = _sibling(final, "staging")
    with ExitStack() as alive:
        with lock_folder(final.parent):
            staging.mkdir()
            alive.enter_context(lock_folder(staging))
        try:
            yield staging
            for path in [staging, *staging.rglob("*")]:
                flush(path)
            with lock_folder(final.parent):
                _rename_over(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `final`, with a manifest, when the block ends, and goes when it raises."""
    with renamed_when_complete(final) as staging:
        yield staging
        write_manifest(staging)


def discard(directory: Path) -> None:
    """Remove a directory; if the process dies meanwhile, nothing stands under its name any more."""
    staging = _sibling(directory, "staging")
    with lock_folder(directory, wait_s=0):  # the caller may hold it; either way no sweep takes it
        directory.rename(staging)
        shutil.rmtree(staging)


def sweep_staging(parent: Path) -> list[Path]:
    """Remove what dead processes left half-made in `parent`, put back what they had renamed aside, and return both."""
    swept = []
    with lock_folder(parent):
        for path in sorted(parent.iterdir()):
            match = LEFTOVER.fullmatch(path.name)
            if match is None:
                continue
            # `discard` may remove it meanwhile.
            with suppress(FileNotFoundError), lock_folder(path, wait_s=0) as is_free:
                if not is_free:
                    continue
                final = parent / match["name"]
                if match["role"] == "aside" and not final.exists():
                    path.rename(final)
                else:
                    shutil.rmtree(path, ignore_errors=True)
                swept.append(path)
    return swept


def publish(directory: Path, kind: str) -> Artifact:
    """Check the directory's manifest and make a reference to it; ValueError where `check_manifest` raises it."""
    return Artifact(uri=directory.resolve().as_uri(), sha256=check_manifest(directory), kind=kind)


def open_artifact(artifact: Artifact) -> Path:
    """Return the artifact's directory; ValueError if its files or its manifest are not those of the reference."""
    sha256 = check_manifest(artifact.path)
    if sha256 != artifact.sha256:
        raise ValueError(f"{artifact.path} has digest {sha256}, the reference says {artifact.sha256}")
    return artifact.path


def _sibling(final: Path, role: str) -> Path:
    return final.with_name(f".{role}-{final.name}-{secrets.token_hex(8)}")


def _rename_over(staging: Path, final: Path) -> None:
    aside = None
    if final.exists():
        aside = _sibling(final, "aside")
        final.rename(aside)
    try:
        staging.rename(final)
    except BaseException:
        if aside is not None:
            aside.rename(final)
        raise
    flush(final.parent)
    if aside is not None:
        shutil.rmtree(aside)
