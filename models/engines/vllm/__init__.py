"""The production engine: vLLM's AsyncLLM with a draft that can be replaced while it serves.

All of vLLM comes into redraft through this package. Importing it starts nothing and imports no vLLM; `VllmEngine.start` does.
"""

import os
from typing import Any, Literal

from models.acceptance import Trace
from models.params import BaseParams, Frozen

PAPER = "arXiv:2309.06180"


class Params(BaseParams):
    """How the engine runs.

    Attributes:
        num_draft_tokens: K; 0 starts an engine that can't speculate.
        dtype: "auto" takes bfloat16 where the processor multiplies it natively.
        enforce_eager: start in 20–30 s without compiling; compiled, one stream is about a tenth faster.
        kv_cache_gib: memory for keys and values (CPU).
        draft_sample_method: "probabilistic" draws drafted tokens from q and accepts more at temperature > 0.
        extra: further vLLM engine arguments, passed through.
    """

    name: Literal["vllm"] = "vllm"
    num_draft_tokens: int = 3
    max_model_len: int = 1024
    max_num_seqs: int = 32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    enforce_eager: bool = True
    kv_cache_gib: int = 1
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    extra: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults


class Sampling(Frozen):
    """How one request is decoded; temperature 0 is greedy, `num_logprobs` of 2 or more records the gaps of the top two."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None
    ignore_eos: bool = False


class Completion(Frozen):
    """One finished answer and how it was drafted.

    Attributes:
        drafted, accepted: tokens of each verification step; the prefill is no step, a step without a draft counts as 0.
        drafted_ids: the drafted tokens of each step.
        gaps: log-probability of the best token minus that of the second, at each position; empty unless asked for.
        finish_reason: None when the client went away.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted_ids: tuple[tuple[int, ...], ...]
    finish_reason: str | None
    first_token_ms: float
    per_token_ms: float
    draft_version: str
    speculating: bool
    gaps: tuple[float, ...] = ()

    def trace(self, domain: str) -> Trace:
        """What acceptance is computed from."""
        return Trace(
            request_id=self.request_id,
            token_ids=self.token_ids,
            drafted=self.drafted,
            accepted=self.accepted,
            domain=domain,
        )


def child_environment(params: Params | None = None, num_threads: int | None = None) -> dict[str, str]:
    """Return the variables that a process must be started with to run this engine on a CPU.

    "auto" binding leaves the worker one core of two, so cores are named.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str((params or Params()).kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }


def __getattr__(name: str) -> Any:
    """Import the engine itself on first use, because vLLM takes seconds to import."""
    if name == "VllmEngine":
        from models.engines.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__} has no attribute {name}")
