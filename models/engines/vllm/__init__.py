"""The production engine: vLLM's AsyncLLM with a draft that can be replaced while it serves.

All of vLLM comes into redraft through this package. Importing it starts nothing and imports no vLLM; `VllmEngine.start`
does.
"""

import os
from pathlib import Path
from typing import Any, Literal

from models.engines import Engine
from models.params import BaseParams

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


async def start(
    target: Path, draft: Path | None, params: Params, served_name: str = "target", draft_version: str = ""
) -> Engine:
    """See `VllmEngine.start`; vLLM takes seconds to import, so that happens here."""
    from models.engines.vllm.engine import VllmEngine

    return await VllmEngine.start(target, draft, params, served_name, draft_version)


def __getattr__(name: str) -> Any:
    """Import the engine itself on first use, because vLLM takes seconds to import."""
    if name == "VllmEngine":
        from models.engines.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__} has no attribute {name}")
