"""A directory's manifest: the sha256 and size of every file in it, kept beside them in `manifest.json`.

The digest of a directory is that of its list of files, so it does not depend on where the directory lies. Symbolic
links are refused: their bytes live elsewhere.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from infra.files import flush, write_atomic
from models.types import Frozen

MANIFEST_NAME = "manifest.json"


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


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path) -> str:
    """Write `manifest.json` over every file below `directory`, in one rename, flushed; return its digest."""
    entries = {
        name: FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size) for name, path in _files(directory).items()
    }
    manifest = Manifest(files=entries)
    write_atomic(directory / MANIFEST_NAME, json.dumps(manifest.model_dump(), indent=1, sort_keys=True))
    flush(directory)
    return manifest.digest()


def check_manifest(directory: Path) -> str:
    """Compare every file below `directory` with the manifest, and return the directory's digest.

    Sizes are compared before contents, so that a truncated file is named as such and costs no reading.

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
        sha256, wanted = file_sha256(path), manifest.files[name]
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
