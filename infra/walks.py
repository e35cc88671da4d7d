"""Looks into folders that others write meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_under(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those below it, links too; none where there is no such folder.

    Unlike `Path.rglob`, which fails when a folder goes away while it is read, as a compiler's do, this leaves it out.
    """
    for inner, _, names in os.walk(folder):
        yield from (Path(inner, name) for name in names)
