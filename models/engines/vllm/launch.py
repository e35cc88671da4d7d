"""Starts the engine's processes: what vLLM is told, in which environment, and how an interrupt ends it."""

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import vllm
from vllm import AsyncEngineArgs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.system_utils import set_env_var
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from models.core.drafting.draft_families import family_of, name_of
from models.engines.vllm import PLANNED_BY, Params, native_build, patches
from models.engines.vllm.fields import Setup, WithParent
from models.engines.vllm.measuring import measured_for
from models.engines.vllm.redraft_vllm.worker import DraftExtension
from models.engines.vllm.tap import InstrumentedLLM
from models.params import require_unsaid

# How a thread of Intel's OpenMP waits for others: it yields its core only where there are more threads than cores, and
# sleeps after 1 ms (vLLM: 5), so that between two steps a core is free for what hands the tokens on
# (KMP_USE_YIELD: https://reviews.llvm.org/D58148).
OPENMP = {"KMP_USE_YIELD": "2", "KMP_BLOCKTIME": "1"}
# vLLM has two model runners and chooses by what is installed; `worker.DraftWorker` steers the first.
RUNNER, RUNNER_V1 = "VLLM_USE_V2_MODEL_RUNNER", "0"
INVARIANT_GPU = "VLLM_BATCH_INVARIANT"  # vLLM's own mode; on a CPU `patches.batch_invariance` is
VLLM_DRAFTS = "on a GPU vLLM drafts by itself unless [engine] plan_steps is true"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Speculation(NamedTuple):
    """How an engine is to draft; most of it as `VllmEngine.start` takes it."""

    target: Path
    draft: Path | None
    params: Params
    dtype: str
    eager: bool
    costs: Path | None
    captures: bool = False
    unplanned: str = ""  # why no step is planned; "" plans them where that is possible
    place: str = "cpu"  # see `measuring.place_of`
    on_gpu: bool = False  # whether vLLM runs on one

    @property
    def vllm_drafts(self) -> bool:
        """Whether vLLM's own runner, worker and proposer draft, with nothing of them changed."""
        return self.on_gpu and self.params.plan_steps is not True

    def arguments(self) -> tuple[dict[str, Any], Setup | None]:
        """Return vLLM's arguments, and what its scheduler plans by; none where nothing is drafted or planned.

        ValueError if vLLM drafts only another number of tokens with this draft, or a key would do nothing here.
        """
        params = self.params
        if self.vllm_drafts:
            require_unsaid(params, PLANNED_BY, "[engine]", VLLM_DRAFTS)
        if self.draft is None or params.num_draft_tokens == 0:
            return {}, None
        own = family_of(self.draft).vllm_config(self.draft)
        if (k := own.get("num_speculative_tokens", params.num_draft_tokens)) != params.num_draft_tokens:
            raise ValueError(
                f"draft {self.draft.name} drafts {k} tokens in every step of vLLM, no other number; "
                f"got num_draft_tokens {params.num_draft_tokens}"
            )
        drafting = {
            **own,
            "num_speculative_tokens": params.num_draft_tokens,
            "draft_sample_method": "greedy" if params.draft_sample_method == "greedy" else "probabilistic",
        }
        setup: Setup | None = None
        if not self.vllm_drafts and (why := self.why_unplanned()):  # vLLM's proposer draws by another noise
            if params.plan_steps is False and params.draft_sample_method == "probabilistic":
                raise ValueError(f'[engine] draft_sample_method "probabilistic" can\'t be kept on a CPU, since {why}')
            drafting["draft_sample_method"] = "greedy"
        if not self.why_unplanned():
            drafting["num_speculative_tokens"] = most = max(params.num_draft_tokens, params.lookup.num_tokens)
            facts = measured_for(
                self.target, self.draft, self.dtype, self.eager, vllm.__version__, 1 + most, self.place
            )
            file = self.costs and self.costs / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
            one_pass = own.get("parallel_drafting", False)
            setup = Setup(params.num_draft_tokens, params.lookup, params.lengths, file, facts, self.captures, one_pass)
        # Metrics of an answer: metrics.speculative_decoding.
        metrics = "detailed" if self.vllm_drafts else "summary"
        return {"speculative_config": drafting, "per_request_spec_decode_metrics": metrics}, setup

    def why_unplanned(self) -> str:
        """Return why each step drafts the same number of tokens; "" where steps are planned or nothing is drafted."""
        if self.draft is None or self.params.num_draft_tokens == 0:
            return ""
        family = family_of(self.draft)
        if getattr(family, "FIXED_K", False):
            return f"a draft of this kind ({name_of(family)}) drafts the same number of tokens in each step"
        if self.vllm_drafts:
            return VLLM_DRAFTS
        return self.unplanned if self.params.plan_steps else "[engine] plan_steps is false"


def engine_arguments(wanted: Speculation, served_name: str) -> tuple[dict[str, Any], Setup | None]:
    """Return what vLLM is told, by what it runs on and what is asked of it; Raises what `Speculation.arguments` does.

    On a GPU vLLM drafts by itself unless steps are to be planned: with its runner, padded batches and asynchronous
    scheduling, as of a server whose draft `redraft_vllm` replaces. Not run on one.
    """
    params, (speculative, setup) = wanted.params, wanted.arguments()
    if wanted.vllm_drafts:
        runs: dict[str, Any] = {"worker_extension_cls": f"{DraftExtension.__module__}.{DraftExtension.__qualname__}"}
    else:
        runs = {
            "distributed_executor_backend": "mp",
            "worker_cls": "models.engines.vllm.worker.DraftWorker",
            "scheduler_cls": "models.engines.vllm.scheduler.TracingScheduler",
            "async_scheduling": False,
        }
    told = {
        "model": str(wanted.target),
        "served_model_name": [served_name],
        "dtype": wanted.dtype,
        "max_model_len": params.max_model_len,
        "max_num_seqs": params.max_num_seqs,
        "enforce_eager": wanted.eager,
        "scheduling_policy": "priority",
        # "auto" compiles all by what the first request needed.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
        "disable_log_stats": False,
    }
    return {**told, **runs, **speculative, **params.extra}, setup


def scheduler_of(config: VllmConfig) -> str:
    """Return which scheduler suits vLLM's own drafting, as vLLM settled whether it schedules asynchronously."""
    name = "AsyncDraftScheduler" if config.scheduler_config.async_scheduling else "TracingScheduler"
    return f"models.engines.vllm.scheduler.{name}"


def launch(
    wanted: Speculation, served_name: str, draft_version: str
) -> tuple[InstrumentedLLM, AsyncEngineArgs, Setup | None]:
    """Start the processes; what is to follow plans does not yet. Raises what `VllmEngine.start` does.

    Returns vLLM's engine, the arguments it was made by, and what its scheduler plans by, if anything is planned.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not wanted.vllm_drafts and (asked := os.environ.setdefault(RUNNER, RUNNER_V1)) != RUNNER_V1:
        raise ValueError(f"{RUNNER} is {asked}, wanted {RUNNER_V1} or nothing: drafts are swapped in the V1 runner")
    require_invariance(wanted)
    patches.install("frontend")
    arguments, setup = engine_arguments(wanted, served_name)
    args = AsyncEngineArgs(**arguments)
    invariant = str(int(wanted.params.batch_invariant))
    with set_env_var(INVARIANT_GPU if wanted.on_gpu else native_build.INVARIANT, invariant):
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if wanted.vllm_drafts:
            config.scheduler_config.scheduler_cls = scheduler_of(config)
        config.additional_config = setup or config.additional_config or WithParent()
        with nullcontext() if wanted.on_gpu else _worker_inside(config), interruptible():
            # Annotated with the base class; it makes one of the class it is called on.
            llm = cast(
                "InstrumentedLLM",
                InstrumentedLLM.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER),
            )
    llm.draft_version, llm.speculating = draft_version, args.speculative_config is not None
    llm.rules = wanted.params.rules
    return llm, args, setup


def require_invariance(wanted: Speculation) -> None:
    """Raise ValueError if a batch-invariant engine is wanted where no kernel is, or wanted by the environment alone."""
    params, has_kernels = wanted.params, torch.cpu._is_avx512_bf16_supported()
    if (asked := os.environ.get(INVARIANT_GPU, "0")) != "0":
        raise ValueError(f"{INVARIANT_GPU} is {asked}, wanted 0 or nothing: set [engine] batch_invariant")
    if not params.batch_invariant or wanted.on_gpu:
        return
    if wanted.dtype != "bfloat16" or not has_kernels or params.num_devices > 1:
        here = f"{wanted.dtype}, {'one with' if has_kernels else 'one without'}, {params.num_devices}"
        raise ValueError(
            f"[engine] batch_invariant: wanted bfloat16, a processor with AVX512_BF16 and one rank on a CPU, got {here}"
        )


@contextmanager
def _worker_inside(config: VllmConfig) -> Iterator[None]:
    """Let a single worker share the scheduler's process, which is to be started in the block.

    For a CPU vLLM always gives the worker a process of its own, because OpenMP learns its cores from the environment.
    The two then wait for each other in loops that yield their core; on two cores under Linux 6.18 the tokens of a
    stream came in bunches, up to a second late. The same environment does for one process.
    """
    if config.parallel_config.world_size_across_dp > 1:
        yield
        return
    config.parallel_config.distributed_executor_backend = UniProcExecutor
    with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0), ExitStack() as stack:
        for name, value in OPENMP.items():
            stack.enter_context(set_env_var(name, value))
        yield


class _Interrupted(BaseException):
    """A `KeyboardInterrupt` that nobody catches on its way."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise the `KeyboardInterrupt` of a signal's handler out of the block, whatever the block does with it.

    While vLLM waits for the processes that it started it takes one for its own: it closes the socket that they were to
    answer on, goes on, and waits ten minutes for them to be ready.

    What handlers do else is left to them. In other threads than the main one, where no handler runs, nothing changes.
    """
    former = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        former.clear()

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            former[signal.Signals(number)](number, frame)
        except KeyboardInterrupt as interrupt:
            raise _Interrupted from interrupt

    for number in former:
        signal.signal(number, handle)
    try:
        yield
    except _Interrupted as interrupted:
        raise KeyboardInterrupt from interrupted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
