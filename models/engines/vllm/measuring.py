"""What steps take on the machine at hand: measured before an engine serves, and kept for the ones after it.

One choice follows from it here, whether an engine compiles its models or runs them operation by operation. Compiling
takes minutes once for a machine and shape, and even what was compiled starts later. So an engine that only answers a
batch, as a build's does, is eager. One that serves runs as is faster here: each engine leaves what a plain step of one
sequence takes (`Times`), and the next one compares. Until both are known it compiles, as was faster wherever both were
tried (AVX2 in float32, and bfloat16 units). 8-bit and 4-bit targets stay eager on processors without bfloat16 units:
`patches.linear_kernels` multiplies their packed weights as they are, outside of compiled code.
"""

import asyncio
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, ValidationError
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from models.engines.vllm import Params, native_build
from models.engines.vllm.fields import MEASURE, OPTIONS, DraftOptions
from models.engines.vllm.planning import cycles, turns
from models.types import Frozen

if TYPE_CHECKING:
    from models.engines.vllm.engine import VllmEngine

# Times that all is measured, some time apart, since what else runs on the machine comes and goes.
NUM_ROUNDS = 2
# Tokens of each prompt: about as many as a short chat has, since attention takes its time by them. All are alike, so
# that only the first of them is read in full.
NUM_PROMPT_TOKENS = 129
# Answers, and tokens of each, whose fastest tells what a plain step takes: what else runs can only make it longer.
NUM_PLAIN, PLAIN_TOKENS = 5, 16

log = logging.getLogger(__name__)


class Mode(NamedTuple):
    """How an engine runs, and why, for whoever reads the status."""

    eager: bool
    why: str

    def __str__(self) -> str:
        return f"{'eager' if self.eager else 'compiled'}: {self.why}"


class _File(Frozen):
    measured_for: str
    plain_ms: float = Field(gt=0, allow_inf_nan=False)


class Times:
    """What a plain step of one sequence takes in each mode, kept in a folder over restarts."""

    def __init__(self, folder: Path | None, measured_for: Mapping[bool, str]) -> None:
        """Keep nothing without a folder; `measured_for` says by mode, eager or not, what a time holds for."""
        names = {eager: hashlib.sha256(holds.encode()).hexdigest()[:16] for eager, holds in measured_for.items()}
        self._files = {} if folder is None else {eager: folder / f"plain-{name}.json" for eager, name in names.items()}
        self._measured_for = measured_for

    def plain_ms(self, eager: bool) -> float | None:
        """Return what an earlier engine left; None if none ran here so, or its file is torn."""
        try:
            saved = _File.model_validate_json(self._files[eager].read_bytes())
        except (KeyError, OSError, ValidationError):
            return None
        return saved.plain_ms if saved.measured_for == self._measured_for[eager] else None

    def keep(self, eager: bool, plain_ms: float) -> None:
        """Leave a time for later engines; OSError if it can't be written."""
        if (file := self._files.get(eager)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.new")
            new.write_text(_File(measured_for=self._measured_for[eager], plain_ms=plain_ms).model_dump_json())
            os.replace(new, file)


def mode_of(params: Params, target: Path, dtype: str, serves: bool, times: Times) -> Mode:
    """Return how an engine of a target runs, by its settings where they say it.

    `serves` is whether it is to run on, rather than to answer a batch.
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


async def measure(engine: "VllmEngine") -> None:
    """Measure what steps of an engine take, for some seconds at most; what an earlier engine left is taken as it is.

    Plain steps of one sequence are timed in any engine that keeps its times, for the choice of the next one's mode.
    Where steps are planned, all are: by numbers of sequences, rows and passes.
    """
    if engine.times.plain_ms(engine.mode.eager) is None:
        plain_ms = min([await _plain_ms(engine, f"measure-plain-{number}") for number in range(NUM_PLAIN)])
        try:
            engine.times.keep(engine.mode.eager, plain_ms)
        except OSError as error:
            log.warning("what a plain step takes was not kept: %s", error.strerror)
    setup = engine.setup
    if setup is None or setup.known_cost() is not None:
        return
    for number in range(NUM_ROUNDS):
        for num, num_cycles in cycles(engine.llm.vllm_config.scheduler_config.max_num_seqs).items():
            draft_options, name = DraftOptions(MEASURE, domain=str(num)), f"measure-{number}-{num}"
            # The first token is read off the prompt.
            num_tokens = 1 + num_cycles * len(turns(num, setup.lookup.num_tokens))
            await asyncio.gather(*(_answer(engine, draft_options, num_tokens, f"{name}-{at}") for at in range(num)))


async def _plain_ms(engine: "VllmEngine", request_id: str) -> float:
    times_s = await _answer(engine, DraftOptions("off"), PLAIN_TOKENS, request_id)
    return 1000 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


async def _answer(engine: "VllmEngine", draft_options: DraftOptions, num_tokens: int, request_id: str) -> list[float]:
    """Return when each output came; nobody is told of the request."""
    most = engine.llm.vllm_config.model_config.max_model_len // 2
    prompt = TokensPrompt(prompt_token_ids=[1] * min(NUM_PROMPT_TOKENS, most))
    wanted = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    wanted.extra_args = {OPTIONS: draft_options}
    return [time.monotonic() async for _ in AsyncLLM.generate(engine.llm, prompt, wanted, request_id)]


def place_of(params: Params, accelerator: str) -> str:
    """Return what an engine computes on: an accelerator's name, "cpu" for none, over how many and by which kernels."""
    sizes = [f"{name} {size}" for name, size in sorted(params.extra.items()) if "parallel" in name]
    return ", ".join([accelerator, *sizes, *(["batch invariant"] if params.batch_invariant else [])])


def measured_for(
    target: Path,
    draft: Path | None,
    dtype: str,
    eager: bool,
    version: str,
    num_verified: int = 1,
    place: str = "cpu",
) -> str:
    """Return what times hold for: this processor and its cores, the models' shapes, vLLM and its mode.

    And how many rows are verified of one sequence at most, by which their kernel is chosen, and `place_of` the engine.
    """
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    shapes = {name: hashlib.sha256((at / "config.json").read_bytes()).hexdigest()[:12] for name, at in models.items()}
    facts = {
        "processor": _processor(),
        "accelerator": place,
        "cores": len(os.sched_getaffinity(0)),
        **shapes,
        **({"few rows": f"{kernel}, {num_verified} verified"} if (kernel := native_build.kernel_for(target)) else {}),
        "attention": native_build.version(native_build.ATTENTION),
        "passes": native_build.version(native_build.FUSED_EAGLE3),
        "draws": native_build.version(native_build.SAMPLING),
        "dtype": dtype,
        "mode": "eager" if eager else "compiled",
        "vLLM": version,
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "cpu family", "model", "stepping")
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return " ".join(value.strip() for name, value in found.items() if name.strip() in wanted)
