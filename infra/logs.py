"""Log files as lines, with the end first."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TAIL_BYTES = 1 << 18
POLL_S = 0.3


def last_lines(file: Path, num_lines: int) -> list[str]:
    """Return the last lines, as far as they lie in the last 256 KiB."""
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
        time.sleep(POLL_S)
