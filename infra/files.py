"""Files that others read or write meanwhile, and locks between processes, on a file or a folder.

The kernel releases a lock with its process, after kill -9 too.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

TAIL_BYTES = 1 << 18
LOG_POLL_S, LOCK_POLL_S = 0.3, 0.05


def write_atomic(file: Path, content: str | bytes) -> None:
    """Write a file in one rename, flushed to the disk, for its owner alone; a reader finds the old content or the new.

    ValueError if the folder does not exist, or `file` is a directory.
    """
    if not file.parent.is_dir():
        raise ValueError(f"{file} can't be written: there is no folder {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder, wanted the name of a file")
    with replacing(file) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield an empty file beside `file` that replaces it when the block ends, and is removed when the block raises."""
    temporary = file.with_name(f".{file.name}.{threading.get_native_id()}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        yield temporary
        os.fsync(descriptor)
        temporary.replace(file)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file, or a directory's entries, so that a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_under(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those below it, links too; none where there is no such folder.

    Unlike `Path.rglob` it does not fail when a folder goes away while it is read, as a compiler's do.
    """
    for inner, _, names in os.walk(folder):
        yield from (Path(inner, name) for name in names)


def last_lines(file: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log file, as far as they lie in the last 256 KiB."""
    with file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()[-num_lines:]


def follow_logs(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield file and line of what is appended from now on, for ever."""
    ends = {file: file.stat().st_size for file in files}
    while True:
        for file, end in ends.items():
            with file.open("rb") as log:
                log.seek(end)
                whole, newline, _ = log.read().rpartition(b"\n")
            ends[file] = end + len(whole) + len(newline)
            for line in whole.decode(errors="replace").splitlines():
                yield file, line
        time.sleep(LOG_POLL_S)


def lock_file(file: Path, shared: bool = False, wait_s: float | None = None) -> AbstractContextManager[bool]:
    """Hold a lock file, which is made where it is missing; yields whether it is held.

    Those who share it hold it at the same time. Without `wait_s` it is waited for until it is free.
    """
    return _locked(file, os.O_RDWR | os.O_CREAT, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)


def lock_folder(folder: Path, wait_s: float | None = None) -> AbstractContextManager[bool]:
    """Hold a folder alone, so that nobody takes it for that of a dead process; otherwise as `lock_file`."""
    return _locked(folder, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX, wait_s)


@contextmanager
def _locked(path: Path, flags: int, kind: int, wait_s: float | None) -> Iterator[bool]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield _take(descriptor, kind, wait_s)
    finally:
        os.close(descriptor)


def _take(descriptor: int, kind: int, wait_s: float | None) -> bool:
    if wait_s is None:
        fcntl.flock(descriptor, kind)
        return True
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOCK_POLL_S)
        else:
            return True
