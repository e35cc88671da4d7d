"""Let a compiled engine start from what an earlier one compiled.

vLLM 0.32 saves what it compiled ahead of time, but on a CPU never loads it again: it calls `finalize_loading` on what
is a plain function there, takes the AttributeError for a torn file and compiles anew, which takes minutes. A function
has nothing to finalize.
"""

from functools import wraps
from typing import Any

import torch

NAME = "finalize_loading"


def install() -> None:
    """Let torch hand out loaded functions that vLLM can finalize; called before a model is loaded."""
    load = torch.compiler.load_compiled_function
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_finalizable(*args: Any, **options: Any) -> Any:
        loaded: Any = load(*args, **options)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, NAME):
            setattr(function, NAME, lambda config: None)
        return loaded

    torch.compiler.load_compiled_function = load_finalizable
