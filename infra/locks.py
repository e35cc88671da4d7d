"""Locks between processes, on a file or a folder, exclusive or shared, for as long as a block lasts.

The kernel releases a lock with the process, after kill -9 too, so nothing has to be cleaned up.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05


@contextmanager
def lock_file(file: Path, shared: bool = False, wait_s: float | None = None) -> Iterator[bool]:
    """Hold a lock file, which is made where it is missing; yields whether it is held.

    Those who share it hold it at the same time. Without `wait_s` it is waited for until it is free.
    """
    with _opened(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as descriptor:
        yield _take(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)


@contextmanager
def lock_folder(folder: Path, wait_s: float | None = None) -> Iterator[bool]:
    """Hold a folder alone, so that nobody takes it for that of a dead process; otherwise as `lock_file`."""
    with _opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        yield _take(descriptor, fcntl.LOCK_EX, wait_s)


@contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
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
