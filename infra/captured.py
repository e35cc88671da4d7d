"""Files of hidden states that were captured of served rows: one a row, in a folder beside the query log.

They count as text: each goes with its row, after a training that had the row, or by age.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

SUFFIX = ".states"


class CapturedFiles:
    """The files beside a query log, in a folder that need not exist."""

    def __init__(self, querylog: Path) -> None:
        self.folder = querylog.with_name(f"{querylog.stem}-states")

    def path_of(self, row_id: str) -> Path:
        return self.folder / f"{hashlib.sha256(row_id.encode()).hexdigest()[:32]}{SUFFIX}"

    def make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def num_bytes(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    def forget(self, row_ids: Iterable[str]) -> int:
        return sum(_removed(self.path_of(row_id)) for row_id in row_ids)

    def forget_others(self, row_ids: Iterable[str], older_than_s: float) -> int:
        """Remove the files, written longer ago, of all rows but these, and what a killed process left of one."""
        kept = {self.path_of(row_id) for row_id in row_ids}
        return sum(_removed(file) for file in self._before(older_than_s) if file not in kept)

    def forget_older_than(self, days: float) -> int:
        return sum(_removed(file) for file in self._before(days * 24 * 3600))

    def _before(self, older_than_s: float) -> list[Path]:
        return [file for file, stat in self._files() if stat.st_mtime < time.time() - older_than_s]

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # others remove files too
                    yield Path(entry.path), entry.stat()


def _removed(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True
