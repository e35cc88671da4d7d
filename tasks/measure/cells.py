"""Finished measurements on disk, so that an interrupted benchmark, comparison or demonstration continues."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.files import write_atomic

# What a demonstration leaves: its figures, and the phases whose answers are acceptance over time, in their order.
RESULT, PHASES = "result.json", ("before", "traffic", "meanwhile", "after")


class Cells:
    """The finished cells of one benchmark or comparison, all measured with one setup."""

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        """Open a folder of figures; ValueError names what differs if it holds cells of another setup."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        file, wanted = folder / "setup.json", json.loads(json.dumps(setup))
        if not file.is_file():
            write_atomic(file, json.dumps(wanted, allow_nan=False) + "\n")
        found = json.loads(file.read_text())
        if differing := sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)):
            raise ValueError(
                f"{folder} holds cells measured with another {', '.join(differing)}; "
                "remove the folder, or choose another with --output"
            )

    def has(self, name: str) -> bool:
        return self._file(name).is_file()

    def keep(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a finished cell, as JSON, measured now unless it is on disk; its name is good for a file's."""
        if not self.has(name):
            write_atomic(self._file(name), json.dumps(measure(), allow_nan=False) + "\n")
        return self.read(name)

    def read(self, name: str) -> Any:
        return json.loads(self._file(name).read_text())

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def answers_of(folder: Path, phase: str) -> list[dict[str, Any]]:
    """Return a demonstration's answers of a phase, in the order they ended, without one that a kill cut short."""
    file, rows = folder / f"{phase}.jsonl", []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
