"""Whether an engine compiles its models or runs them operation by operation: one rule, in one place.

Compiling takes minutes once for a machine and shape, and even what was compiled starts later. So an engine that only
answers a batch, as a build's does, is eager. One that serves runs as is faster here: each engine leaves what a plain
step of one sequence takes (`Times`), and the next one compares. Until both are known it compiles, as was faster
wherever both were tried (AVX2 in float32, and bfloat16 units). 8-bit and 4-bit targets stay eager on processors without
bfloat16 units: `linear_kernels` multiplies their packed weights as they are, outside of compiled code.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from models.engines.vllm import Params
from models.types import Frozen


class Mode(NamedTuple):
    """How an engine runs, and why.

    Attributes:
        eager: operation by operation.
        why: for whoever reads the status.
    """

    eager: bool
    why: str

    def __str__(self) -> str:
        """Return it as the status says it."""
        return f"{'eager' if self.eager else 'compiled'}: {self.why}"


class _File(Frozen):
    measured_for: str
    plain_ms: float = Field(gt=0, allow_inf_nan=False)


class Times:
    """What a plain step of one sequence takes in each mode, kept in a folder over restarts."""

    def __init__(self, folder: Path | None, measured_for: Mapping[bool, str]) -> None:
        """Keep nothing without a folder; `measured_for` says by mode, eager or not, what a time holds for."""
        self._folder, self._measured_for = folder, measured_for

    def plain_ms(self, eager: bool) -> float | None:
        """Return what an earlier engine left; None if none ran here so, or its file is torn."""
        file = self._file(eager)
        if file is None:
            return None
        try:
            saved = _File.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None
        return saved.plain_ms if saved.measured_for == self._measured_for[eager] else None

    def keep(self, eager: bool, plain_ms: float) -> None:
        """Leave a time for later engines; OSError if it can't be written."""
        file = self._file(eager)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(_File(measured_for=self._measured_for[eager], plain_ms=plain_ms).model_dump_json())
        os.replace(new, file)

    def _file(self, eager: bool) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"plain-{hashlib.sha256(self._measured_for[eager].encode()).hexdigest()[:16]}.json"


def mode_of(params: Params, target: Path, dtype: str, serves: bool, times: Times) -> Mode:
    """Return how an engine of a target runs.

    Args:
        params: its settings; anything but "auto" decides.
        target: a Hugging Face directory.
        dtype: what it computes in.
        serves: whether it is to run on, rather than to answer a batch.
        times: what was measured.
    """
    if params.enforce_eager != "auto":
        return Mode(params.enforce_eager, "[engine] enforce_eager says so")
    if not serves:
        return Mode(True, "it ends before compiling would have paid")
    if dtype == "float32" and "quantization_config" in json.loads((target / "config.json").read_text()):
        return Mode(True, "this processor multiplies a quantized target's weights as they are only in eager mode")
    eager_ms, compiled_ms = times.plain_ms(eager=True), times.plain_ms(eager=False)
    if eager_ms is None or compiled_ms is None:
        return Mode(False, "compiled steps were faster wherever both were tried; here they were not both measured yet")
    if eager_ms < compiled_ms:
        return Mode(True, f"a plain step takes {eager_ms:.1f} ms here, {compiled_ms:.1f} compiled")
    return Mode(False, f"a plain step takes {compiled_ms:.1f} ms here, {eager_ms:.1f} eager")
