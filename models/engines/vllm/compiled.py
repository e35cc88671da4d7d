"""Let a compiled engine start from what an earlier one compiled.

vLLM 0.32 saves what it compiled ahead of time, but on a CPU never loads it again: it calls `finalize_loading` on what
is a plain function there, takes the AttributeError for a torn file and compiles anew, which takes minutes. A function
has nothing to finalize.

It also names what it compiled by the folders of the models, so that a start with another draft compiles anew. Graphs
take weights as inputs and follow from the configs and the operators that they call: here two folders with the same
config.json share them.

And it pins the thread that compiles to the engine's first core, where two engines that start together wait for each
other for minutes while other cores idle.
"""

import copy
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ModelConfig

from models.engines.vllm import attention, few_rows, native

NAME = "finalize_loading"
# What of a model's configuration tells where it lies.
CONFIGS = ("hf_config", "hf_text_config")


def install() -> None:
    """Let torch hand out loaded functions that vLLM can finalize, and vLLM name graphs by what they compute.

    And let it compile on whichever core is free. Called before a model is loaded.
    """
    _load_finalizable()
    _name_by_config()
    _compile_on_any_core()


def _load_finalizable() -> None:
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


def _name_by_config() -> None:
    own = ModelConfig.compute_hash
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def compute_hash(self: Any) -> str:
        file = Path(self.model, "config.json")
        if not file.is_file():  # a hub's name
            return own(self)
        placeless = copy.copy(self)
        operators = f"{few_rows.kernel_for(file.parent)} {native.version(attention.SOURCE)}"
        placeless.model = hashlib.sha256(file.read_bytes() + operators.encode()).hexdigest()
        for name in CONFIGS:
            setattr(placeless, name, _Placeless(getattr(self, name), self.model))
        return own(placeless)

    ModelConfig.compute_hash = compute_hash  # type: ignore[method-assign]  # vLLM has no hook


def _compile_on_any_core() -> None:
    own = TorchCompileWithNoGuardsWrapper.aot_compile
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def aot_compile(self: Any, *args: Any, **options: Any) -> Any:
        with on_any_core():
            return own(self, *args, **options)

    TorchCompileWithNoGuardsWrapper.aot_compile = aot_compile  # type: ignore[method-assign]  # vLLM has no hook


@contextmanager
def on_any_core() -> Iterator[None]:
    """Let this thread run on each core that a thread of this process may use, for as long as the block lasts."""
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set().union(*map(_cores_of, os.listdir("/proc/self/task"))))
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)


def _cores_of(thread: str) -> set[int]:
    try:
        return os.sched_getaffinity(int(thread))
    except ProcessLookupError:  # it has ended meanwhile
        return set()


class _Placeless:
    """A model's config that says of its folder nothing, as far as vLLM asks it for its name."""

    def __init__(self, config: Any, folder: str) -> None:
        self._config, self._folder = config, folder

    def to_json_string(self) -> str:
        text: str = self._config.to_json_string()
        return text.replace(self._folder, "")
