"""What is changed of vLLM's inside: a file for each change, and `install`, which makes them.

Each file says which symbols of vLLM it replaces, the releases that it was tried with, why no public hook serves, and
what happens without it. Importing one replaces nothing. `install()` suits the entry point of a plugin, which vLLM calls
in each of its processes; an embedded engine installs in a process what that process needs.

`proposer`, which `fused_eagle3` helps, and `switch` change one running model runner, when a worker is asked to.
"""

import ast
import logging
import pkgutil
import re
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal

# What runs in a process: AsyncLLM, which renders requests and hands answers on, or a worker, which computes.
Role = Literal["frontend", "worker"]
# Looked up when they are installed, because those of a worker take seconds to import, and some may not fit.
CHANGES: dict[Role, tuple[str, ...]] = {
    "frontend": (
        "models.engines.vllm.patches.inspection",
        "models.engines.vllm.patches.renderer",
        "models.engines.vllm.patches.outputs",
    ),
    "worker": (
        "models.engines.vllm.patches.attention",
        "models.engines.vllm.patches.compiled",
        "models.engines.vllm.patches.sampling",
        "models.engines.vllm.patches.dflash",
        "models.engines.vllm.patches.last_tap",
        "models.engines.vllm.patches.small_batch_gemm",
        "models.engines.vllm.patches.batch_invariance",
        "models.engines.vllm.patches.linear_kernels",
    ),
}
# Those that an engine can do without: it is slower, or accepts less. Without the others answers may be wrong, or have
# markers of clients in them, or tell nothing of their steps.
OPTIONAL = frozenset(
    {"attention", "batch_invariance", "compiled", "dflash", "inspection", "last_tap", "small_batch_gemm"}
)

log = logging.getLogger(__name__)


@cache
def install(*roles: Role) -> None:
    """Make the changes for some roles, for both where none is named; before vLLM makes an engine or loads a model.

    One that does not fit the installed release is left out whole, and the log says what is lost.

    Raises:
        ValueError: one does not fit that is not OPTIONAL.
    """
    for role in roles or CHANGES:
        for module in CHANGES[role]:
            make(module)


def make(module: str) -> None:
    """Make one change, by its module's name; what it replaces is looked up before anything is replaced."""
    name = module.rpartition(".")[2]
    told = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())) or ""
    replaced, _, without = told.partition("\nReplaces:")[2].partition("\nWithout it:")
    try:
        for symbol in re.findall(r"`((?:vllm|torch)\.[^`]+)`", replaced):
            pkgutil.resolve_name(symbol)
        change = pkgutil.resolve_name(module)
    except (ImportError, AttributeError) as error:
        if name not in OPTIONAL:
            raise ValueError(f"patch {name} does not fit the vLLM that is installed, and is needed: {error}") from error
        lost = " ".join(without.split())
        log.warning("patch %s is off, vLLM has another layout: %s. Without it: %s", name, error, lost)
        return
    change.install()


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
