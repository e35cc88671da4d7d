"""What is changed of vLLM's inside: a file for each change, and `install`, which makes them.

Each file says which symbols of vLLM it replaces, the releases that it was tried with, why no public hook serves, and
what happens without it. Importing one replaces nothing. `install()` suits the entry point of a plugin, which vLLM calls
in each of its processes; an embedded engine installs in a process what that process needs.

`proposer` and `switch` change one running model runner, when a worker is asked to.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, Literal

# What runs in a process: AsyncLLM, which renders requests and hands answers on, or a worker, which computes.
Role = Literal["frontend", "worker"]


@cache
def install(*roles: Role) -> None:
    """Make the changes for some roles, for both where none is named; before vLLM makes an engine or loads a model."""
    for role in roles or ("frontend", "worker"):
        for changed in _frontend() if role == "frontend" else _worker():
            changed.install()


# Imported here because all import `replace`, and because those of a worker take seconds to import.
def _frontend() -> tuple[ModuleType, ...]:
    from models.engines.vllm.patches import inspection, outputs, renderer

    return inspection, renderer, outputs


def _worker() -> tuple[ModuleType, ...]:
    from models.engines.vllm.patches import (
        attention,
        compiled,
        dflash,
        last_tap,
        linear_kernels,
        sampling,
        small_batch_gemm,
    )

    return attention, compiled, sampling, dflash, last_tap, small_batch_gemm, linear_kernels


def require(holder: Any, *names: str) -> None:
    """Raise ValueError if an object of vLLM's lacks some attributes, so that it has another layout than wanted."""
    for name in names:
        if not hasattr(holder, name):
            raise ValueError(f"vLLM's {type(holder).__name__} has no {name}; another release is installed than wanted")


def replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Let `new` be called in place of a function of vLLM's, with that function first; a second time changes nothing."""
    own = getattr(owner, name)
    made = getattr(own, "made_of", ())
    if new in made:
        return

    @wraps(own)
    def replaced(*args: Any, **options: Any) -> Any:
        return new(own, *args, **options)

    setattr(replaced, "made_of", (*made, new))  # noqa: B010 - a function has no such attribute for the type checker
    setattr(owner, name, replaced)
