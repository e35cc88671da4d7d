"""Looks at a model's class in the process that asks, where vLLM starts another that imports vLLM for it.

Replaces: `vllm.model_executor.models.registry._run_in_subprocess`.
Tried with: vLLM 0.32.
No hook: the registry takes a class that is there already, but only under a name of its own, not for vLLM's models.
Without it: the first start of an engine in an empty cache takes 15 s longer for the target's class, and again for the
    draft's.
"""

from collections.abc import Callable
from typing import Any

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from models.engines.vllm.patches import replace


def install() -> None:
    """Let classes be looked at so, on CPUs only: vLLM's other process is there so that CUDA is not touched in this."""
    if current_platform.is_cpu():
        replace(registry, "_run_in_subprocess", call)


def call(_: Callable[..., Any], look: Callable[[], Any]) -> Any:
    """Return what looking gives."""
    return look()
