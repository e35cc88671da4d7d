"""The file in which what steps take is kept over restarts; the table itself is `models.core.throughput.cost`."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path

from pydantic import Field, ValidationError

from models.core.throughput.cost import Cost
from models.core.throughput.curves import Curve, ascending
from models.types import Frozen, Positive

FORMAT = 2  # since 2 a step lasts until the next one begins


def save(cost: Cost, file: Path) -> None:
    """Write a table as JSON in place of the last one, whole or not at all."""
    scale = math.exp(cost.drift)
    curves = [
        {
            "num_sequences": curve.num_sequences,
            "rows": curve.rows,
            "target_ms": [scale * ms for ms in curve.points],
            "draft_ms": None if curve.draft is None else scale * curve.draft,
        }
        for curve in cost.curves
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps({"format": FORMAT, "measured_for": cost.measured_for, "curves": curves}))
    os.replace(new, file)


def load(file: Path, measured_for: str) -> Cost:
    """Read a table.

    ValueError if there is none, it is torn, or its times hold for something else; then it is measured anew.
    """
    try:
        saved = _File.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{file.name} is no table of what steps take: {first_line}") from error
    if saved.measured_for != measured_for:
        raise ValueError(f"{file.name} was measured for {saved.measured_for}, wanted {measured_for}")
    orders: list[list[float]] = [[curve.num_sequences for curve in saved.curves]]
    orders += [curve.rows for curve in saved.curves]
    rising = all(left < right for numbers in orders for left, right in pairwise(numbers))
    if not rising or any(len(curve.rows) != len(curve.target_ms) for curve in saved.curves):
        raise ValueError(f"{file.name} is no table of what steps take: its points are in no order")
    curves = (Curve(one.num_sequences, tuple(one.rows), ascending(one.target_ms), one.draft_ms) for one in saved.curves)
    return Cost(tuple(curves), measured_for, grows=False)


class _Curve(Frozen):
    num_sequences: int = Field(ge=1)
    rows: list[Positive] = Field(min_length=1)
    target_ms: list[Positive]
    draft_ms: Positive | None


class _File(Frozen):
    format: int = Field(ge=FORMAT, le=FORMAT)
    measured_for: str
    curves: list[_Curve] = Field(min_length=1)
