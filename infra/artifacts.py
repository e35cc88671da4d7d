"""Directories that appear whole or not at all, and the references to them that tasks pass on.

A directory is made under a staging name beside its final one and renamed when it is complete. Renaming cannot replace
a directory that has files in it, so an older one is first renamed aside; `sweep_staging` puts it back if the process
died between the two renames.

A directory's manifest lists the sha256 and size of every file in it, and stands beside them in `manifest.json`. The
digest of a directory is that of this list, so it does not depend on where the directory lies. Symbolic links are
refused: their bytes live elsewhere.

What is opened again and again is hashed once: the cache remembers the digest of a large file with its inode, size and
time of change, and a file that has others is read again. Who must not trust that asks for the bytes to be read.

Who makes a directory holds a lock on it, so a sweep knows what is alive without process ids. The parent's lock covers
the moments in which a directory is not locked yet or has no final name.
"""

import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError

from infra.files import flush, lock_folder, write_atomic
from infra.settings import load_settings
from models.types import Frozen

LEFTOVER = re.compile(r"\.(?P<role>staging|aside)-(?P<name>.+)-[0-9a-f]{16}")
MANIFEST_NAME = "manifest.json"
# Below it reading what was remembered takes as long as reading the file.
REMEMBERED_BYTES = 1 << 16
# A file may change once more within a tick of its file system's clock, under the same time.
TICK_NS = 20_000_000


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
    return Artifact(uri=directory.resolve().as_uri(), sha256=check_manifest(directory, remembered=True), kind=kind)


def open_artifact(artifact: Artifact) -> Path:
    """Return the artifact's directory; ValueError if its files or its manifest are not those of the reference."""
    sha256 = check_manifest(artifact.path, remembered=True)
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


class FileEntry(Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(Frozen):
    """The content of `manifest.json`; the keys of `files` are paths relative to the directory, with forward slashes."""

    format_version: Literal[1] = 1
    files: dict[str, FileEntry]

    def digest(self) -> str:
        return hashlib.sha256(canonical_json(self.model_dump()["files"])).hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the one JSON form of `value` that digests are made of; NaN raises ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def file_sha256(path: Path, remembered: bool = False) -> str:
    """Return the sha256 of a file; with `remembered`, a large one is read only if it is not as it was when it was."""
    before = path.stat()
    if not remembered or before.st_size < REMEMBERED_BYTES:
        return _read_sha256(path)
    stamp = f"{before.st_size} {before.st_mtime_ns}"
    memory = load_settings().digests / f"{before.st_dev:x}-{before.st_ino:x}"
    with suppress(FileNotFoundError):
        known, _, sha256 = memory.read_text().rpartition(" ")
        if known == stamp:
            return sha256
    sha256, after = _read_sha256(path), path.stat()
    if f"{after.st_size} {after.st_mtime_ns}" == stamp and time.time_ns() - after.st_mtime_ns > TICK_NS:
        with suppress(OSError):  # on a full disk it is read again next time
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(memory, f"{stamp} {sha256}")
    return sha256


def _read_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path) -> str:
    """Write `manifest.json` over every file below `directory`, in one rename, flushed; return its digest."""
    entries = {
        name: FileEntry(sha256=file_sha256(path, remembered=True), bytes=path.stat().st_size)
        for name, path in _files(directory).items()
    }
    manifest = Manifest(files=entries)
    write_atomic(directory / MANIFEST_NAME, json.dumps(manifest.model_dump(), indent=1, sort_keys=True))
    flush(directory)
    return manifest.digest()


def check_manifest(directory: Path, remembered: bool = False) -> str:
    """Compare every file below `directory` with the manifest, and return the directory's digest.

    Sizes are compared before contents, so that a truncated file is named as such and costs no reading. With
    `remembered`, contents are compared as `file_sha256` does.

    Raises:
        ValueError: names the directory or file and its fault.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"{directory} has no {MANIFEST_NAME}")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "content"
        raise ValueError(f"{path} is not a manifest of format version 1: {where}: {fault['msg']}") from error
    found = _files(directory)
    for name in manifest.files:
        if name not in found:
            raise ValueError(f"{directory / name} is missing; the manifest lists it")
    for name, path in found.items():
        if name not in manifest.files:
            raise ValueError(f"{path} is extra; the manifest does not list it")
        wanted, size = manifest.files[name], path.stat().st_size
        if size != wanted.bytes:
            raise ValueError(f"{path} has {size} bytes, the manifest says {wanted.bytes}")
    for name, path in found.items():
        sha256, wanted = file_sha256(path, remembered), manifest.files[name]
        if sha256 != wanted.sha256:
            raise ValueError(f"{path} has sha256 {sha256}, the manifest says {wanted.sha256}")
    return manifest.digest()


def _files(directory: Path) -> dict[str, Path]:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a regular file nor a directory")
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST_NAME:
            files[name] = path
    return files
