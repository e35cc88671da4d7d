"""Locks between processes, on a file or a folder; the kernel releases one with its process, after kill -9 too."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

POLL_S = 0.05


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
            time.sleep(POLL_S)
        else:
            return True
