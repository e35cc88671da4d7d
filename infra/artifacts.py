"""Directories with a manifest, and the references to them that tasks pass on.

A directory's manifest lists the sha256 and size of every file in it, and stands beside them in `manifest.json`. The
digest of a directory is that of this list, so it does not depend on where the directory lies. Symbolic links are
refused, because their bytes live elsewhere, but for weights that stay where their owner has them.

What is opened again and again is hashed once: the cache remembers the digest of a large file with its inode, size and
time of change, and a file that has others is read again. Who must not trust that asks for the bytes to be read.

Where machines share no disk, a directory lies in an object store under its digest. Its manifest is written last: before
it is there, nobody takes the directory for whole.

What was fetched from there is kept within a limit of bytes, and never taken away from a process that holds it: by a
shared lock, which the kernel releases with the process. Beyond the limit directories go that nobody holds, least
recently used first; that they were used is the time of the directory itself.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field, ValidationError

from infra.files import discard, files_under, flush, lock_file, lock_folder, renamed_when_complete, write_atomic
from infra.settings import load_settings
from infra.store import SCHEME, ObjectStore
from models.types import MANIFEST_NAME, Frozen

WEIGHTS = ".safetensors"
# Below it reading what was remembered takes as long as reading the file.
REMEMBERED_BYTES = 1 << 16
# A file may change once more within a tick of its file system's clock, under the same time.
TICK_NS = 20_000_000
# Folders of the cache.
CACHED = ("draft", "target", "artifact")
# Owner and directory to the descriptor of its lock: two parts of a process may hold the same one.
_HELD: dict[tuple[str, Path], int] = {}


class Artifact(Frozen):
    """A reference to a directory with a manifest: where it lies, its digest, and what it is ("target", "rows", ...)."""

    uri: str = Field(pattern=r"^(file:///|s3://[^/]+/.)")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    kind: str = Field(min_length=1)

    @property
    def path(self) -> Path:
        """Where it lies on this machine; what lies in an object store has to be opened."""
        if self.uri.startswith(SCHEME):
            raise ValueError(f"{self.uri} is no folder of this machine")
        return path_of(self.uri)


def path_of(uri: str) -> Path:
    """Return the path of a file's address."""
    return Path(unquote(urlsplit(uri).path))


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `final`, with a manifest, when the block ends, and goes when it raises."""
    with renamed_when_complete(final) as staging:
        yield staging
        write_manifest(staging)


def publish(directory: Path, kind: str) -> Artifact:
    """Check the directory's manifest and make a reference to it; ValueError where `check_manifest` raises it."""
    return Artifact(uri=directory.resolve().as_uri(), sha256=check_manifest(directory, remembered=True), kind=kind)


def open_artifact(artifact: Artifact) -> Path:
    """Return the artifact's directory, fetched into the cache if it lies in an object store.

    Raises:
        ValueError: its files or its manifest are not those of the reference.
        ObjectsUnavailable: it is not in the cache, and can't be fetched.
    """

    def check(directory: Path) -> None:
        if (sha256 := check_manifest(directory, remembered=True)) != artifact.sha256:
            raise ValueError(f"{directory} has digest {sha256}, the reference says {artifact.sha256}")

    if not artifact.uri.startswith(SCHEME):
        check(artifact.path)
        return artifact.path
    settings = load_settings()
    final = settings.cache / "artifact" / artifact.sha256[:16]
    return fetched(final, lambda staging: get(artifact.uri, artifact.sha256, staging), check, settings.cache_gib)


def stored(artifact: Artifact) -> Artifact:
    """Return a reference that every machine can follow: into the object store, if artifacts lie in one."""
    root = load_settings().object_store
    if not root or artifact.uri.startswith(SCHEME):
        return artifact
    return artifact.model_copy(update={"uri": put(open_artifact(artifact), artifact.kind, root)})


def put(directory: Path, kind: str, root: str) -> str:
    """Write a checked directory into an object store, unless it is there, and return its address."""
    manifest, store = read_manifest(directory), ObjectStore()
    address = f"{root}/{kind}/{manifest.digest()}"
    if not store.holds(f"{address}/{MANIFEST_NAME}"):
        store.upload([(directory / name, name) for name in (*manifest.files, MANIFEST_NAME)], address)
    return address


def get(address: str, sha256: str, directory: Path) -> None:
    """Fetch a directory from an object store into an empty one, and hash its files as they come.

    Raises:
        ValueError: its digest is not `sha256`, or a file is not as its manifest says; names it.
        ObjectsUnavailable: it is not there as a whole, or the store can't be reached.
    """
    store = ObjectStore()
    content = b"".join(store.chunks(f"{address}/{MANIFEST_NAME}"))
    manifest = parse_manifest(content, f"{address}/{MANIFEST_NAME}")
    if manifest.digest() != sha256:
        raise ValueError(f"{address} has digest {manifest.digest()}, the reference says {sha256}")
    for name, entry in manifest.files.items():
        path, digest = directory / name, hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for chunk in store.chunks(f"{address}/{name}"):
                digest.update(chunk)
                if file.write(chunk) and file.tell() > entry.bytes:
                    raise ValueError(f"{address}/{name} has more than the {entry.bytes} bytes of the manifest")
        if digest.hexdigest() != entry.sha256:
            raise ValueError(f"{address}/{name} has sha256 {digest.hexdigest()}, the manifest says {entry.sha256}")
    time.sleep(TICK_NS / 1e9)  # so that the file that came last is remembered too
    for name, entry in manifest.files.items():
        _remember(directory / name, (directory / name).stat(), entry.sha256)
    (directory / MANIFEST_NAME).write_bytes(content)


def forget(address: str) -> None:
    """Remove a directory from an object store, its manifest first: what is half gone is never taken for whole."""
    ObjectStore().remove(address, MANIFEST_NAME)


def forget_others(kind: str, kept: Collection[str]) -> None:
    """Remove all of a kind from the object store but what lies at some addresses; nothing without a store."""
    if root := load_settings().object_store:
        for address in ObjectStore().folders(f"{root}/{kind}"):
            if address not in kept:
                forget(address)


class FileEntry(Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


def _inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or name.startswith("/") or {"..", "."} & {*parts} or name in ("", MANIFEST_NAME):
        raise ValueError(f"{name!r} is not the path of a file in the directory")
    return name


class Manifest(Frozen):
    """The content of `manifest.json`; the keys of `files` are paths relative to the directory, with forward slashes."""

    format_version: Literal[1] = 1
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]

    def digest(self) -> str:
        return hashlib.sha256(canonical_json(self.model_dump()["files"])).hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the one JSON form of `value` that digests are made of; NaN raises ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def file_sha256(path: Path, remembered: bool = False) -> str:
    """Return the sha256 of a file; with `remembered`, a large one is read only if it is not as it was when it was."""
    before = path.stat()
    if remembered and before.st_size >= REMEMBERED_BYTES:
        with suppress(FileNotFoundError):
            known, _, sha256 = _memory(before).read_text().rpartition(" ")
            if known == _stamp(before):
                return sha256
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if remembered:
        _remember(path, before, sha256)
    return sha256


def _remember(path: Path, before: os.stat_result, sha256: str) -> None:
    """Keep the digest of a large file, if it is still as it was before it was read and can't change unseen."""
    after = path.stat()
    unseen = time.time_ns() - after.st_mtime_ns <= TICK_NS
    if after.st_size < REMEMBERED_BYTES or _stamp(after) != _stamp(before) or unseen:
        return
    with suppress(OSError):  # on a full disk it is read again next time
        _memory(after).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_memory(after), f"{_stamp(after)} {sha256}")


def _memory(stat: os.stat_result) -> Path:
    return load_settings().digests / f"{stat.st_dev:x}-{stat.st_ino:x}"


def _stamp(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns}"


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


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"{directory} has no {MANIFEST_NAME}")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Read a manifest; ValueError if it is none, or names what is no file in its directory."""
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        part = ".".join(str(one) for one in fault["loc"]) or "content"
        raise ValueError(f"{where} is not a manifest of format version 1: {part}: {fault['msg']}") from error


def check_manifest(directory: Path, remembered: bool = False) -> str:
    """Compare every file below `directory` with the manifest, and return the directory's digest.

    Sizes are compared before contents, so that a truncated file is named as such and costs no reading. With
    `remembered`, contents are compared as `file_sha256` does.

    Raises:
        ValueError: names the directory or file and its fault.
    """
    manifest, found = read_manifest(directory), _files(directory)
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
        if path.is_symlink() and path.suffix == WEIGHTS and path.readlink().is_absolute():
            if not path.is_file():
                raise ValueError(f"{path} leads to {path.readlink()}, which is not there")
        elif path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a regular file nor a directory")
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST_NAME:
            files[name] = path
    return files


def fetched(
    final: Path, fetch: Callable[[Path], None], check: Callable[[Path], None], limit_gib: float, owner: str = ""
) -> Path:
    """Return a directory of the cache, which `owner` holds from now on.

    A good copy is returned as it is, a bad one is fetched again. Processes that want the same directory fetch it once.

    Args:
        final: a directory two levels below the cache's own.
        fetch: fills an empty directory with what it checks on the way.
        check: raises ValueError if a directory of the cache is not what it should be.
        limit_gib: of all that lies beside it in the cache; what is held stays whatever the limit.
        owner: who holds it; "" does for as long as the process lives.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _turn_of(final):
        if not _is_good(final, check):
            with renamed_when_complete(final) as staging:
                fetch(staging)
        hold(final, owner)
    now_ns = time.time_ns()  # the file system's own clock has ticks of milliseconds
    os.utime(final, ns=(now_ns, now_ns))
    _make_room(final.parents[1], limit_gib)
    return final


def hold(directory: Path, owner: str = "") -> None:
    """Keep others from removing a directory, until `release` or the end of the process."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if (before := _HELD.pop((owner, directory), None)) is not None:  # of the same, or of one that stood there before
        os.close(before)
    _HELD[owner, directory] = descriptor


def release(owner: str, but: Collection[Path] = ()) -> None:
    """Release what an owner holds, but for some."""
    for key in [key for key in [*_HELD] if key[0] == owner and key[1] not in but]:
        os.close(_HELD.pop(key))


def remove_unheld(directory: Path) -> bool:
    """Remove a directory of the cache unless somebody holds or fetches it; return whether it is gone."""
    with suppress(FileNotFoundError), _turn_of(directory, wait_s=0) as is_free:
        if is_free:
            with lock_folder(directory, wait_s=0) as is_unheld:
                if is_unheld:
                    discard(directory)
    return not directory.exists()


def _turn_of(final: Path, wait_s: float | None = None) -> AbstractContextManager[bool]:
    return lock_file(final.parent / f".{final.name}.lock", wait_s=wait_s)


def _is_good(final: Path, check: Callable[[Path], None]) -> bool:
    if not final.exists():
        return False
    try:
        check(final)
    except ValueError:
        shutil.rmtree(final)
        return False
    return True


def _make_room(cache: Path, limit_gib: float) -> None:
    """Remove what nobody holds, least recently used first, until what is left is within the limit."""
    found = []
    for path in (path for kind in CACHED for path in (cache / kind).glob("[!.]*") if path.is_dir()):
        with suppress(FileNotFoundError):  # another process makes room too
            num_bytes = sum(file.lstat().st_size for file in files_under(path))
            found.append((path.stat().st_mtime, num_bytes, path))
    beyond = sum(num_bytes for _, num_bytes, _ in found) - limit_gib * 2**30
    for _, num_bytes, path in sorted(found):
        if beyond > 0 and remove_unheld(path):
            beyond -= num_bytes
