"""What a demonstration leaves in its folder: its answers, phase by phase, and its figures."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULT = "result.json"
# The phases whose answers are acceptance over time, in their order.
PHASES = ("before", "traffic", "meanwhile", "after")


def answers_of(folder: Path, phase: str) -> list[dict[str, Any]]:
    """Return a phase's answers, in the order they ended; one that a kill cut short is not there."""
    file, rows = folder / f"{phase}.jsonl", []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
