"""What was fetched from elsewhere: within a limit of bytes, and never taken away from a process that holds it.

A process holds a directory by a shared lock, which the kernel releases with it. When the cache is beyond its limit,
directories go that nobody holds, least recently used first; that they were used is the time of the directory itself.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from infra.files import discard, files_under, lock_file, lock_folder, renamed_when_complete

KINDS = ("draft", "target", "artifact")
# Owner and directory to the descriptor of its lock: two parts of a process may hold the same one.
_HELD: dict[tuple[str, Path], int] = {}


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
    """Let go what an owner holds, but for some."""
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
    for path in (path for kind in KINDS for path in (cache / kind).glob("[!.]*") if path.is_dir()):
        with suppress(FileNotFoundError):  # another process makes room too
            num_bytes = sum(file.lstat().st_size for file in files_under(path))
            found.append((path.stat().st_mtime, num_bytes, path))
    beyond = sum(num_bytes for _, num_bytes, _ in found) - limit_gib * 2**30
    for _, num_bytes, path in sorted(found):
        if beyond > 0 and remove_unheld(path):
            beyond -= num_bytes
