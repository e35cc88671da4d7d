"""Files and directories that others read or write meanwhile, and locks between processes, on a file or a folder.

The kernel releases a lock with its process, after kill -9 too.

A directory that must appear whole or not at all is made under a staging name beside its final one and renamed when it
is complete. Renaming cannot replace a directory that has files in it, so an older one is first renamed aside;
`sweep_staging` puts it back if the process died between the two renames. Who makes a directory holds a lock on it, so a
sweep knows what is alive without process ids. The parent's lock covers the moments in which a directory is not locked
yet or has no final name.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

LEFTOVER = re.compile(r"\.(?P<role>staging|aside)-(?P<name>.+)-[0-9a-f]{16}")
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
