"""Let a compiled engine start from what an earlier one compiled.

vLLM saves what it compiled ahead of time, but on a CPU never loads it again: it calls `finalize_loading` on what is a
plain function there and takes the AttributeError for a torn file. A function has nothing to finalize.

It also names what it compiled by the folders of the models. Graphs take weights as inputs and follow from the configs
and the operators that they call: here two folders with the same config.json share them.

And it pins the thread that compiles to the engine's first core. Here that thread may run on each core of its process.

Replaces: `torch.compiler.load_compiled_function`, `vllm.config.ModelConfig.compute_hash`,
    `vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper.aot_compile`.
Tried with: vLLM 0.32, torch 2.13.
No hook: vLLM has no setting for any of the three; its cache folder and its compiler's options are chosen elsewhere.
Without it: each start compiles anew, which takes minutes, and so does a start with another draft of the same shape; two
    engines that start together wait for each other on one core while others idle.
"""

import copy
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ModelConfig

from models.engines.vllm import native_build
from models.engines.vllm.patches import replace


def install() -> None:
    """Let torch hand out functions that vLLM can finalize, name graphs by what they compute, compile on any core."""
    replace(torch.compiler, "load_compiled_function", _load_finalizable)
    replace(ModelConfig, "compute_hash", _hash_placeless)
    replace(TorchCompileWithNoGuardsWrapper, "aot_compile", _compile_on_any_core)


def _load_finalizable(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    loaded = own(*args, **options)
    function = loaded._artifacts.compiled_fn
    if not hasattr(function, "finalize_loading"):
        function.finalize_loading = lambda config: None
    return loaded


def _hash_placeless(own: Callable[[Any], str], config: Any) -> str:
    file = Path(config.model, "config.json")
    if not file.is_file():  # a hub's name
        return own(config)
    placeless = copy.copy(config)
    operators = f"{native_build.kernel_for(file.parent)} {native_build.version(native_build.ATTENTION)}"
    placeless.model = hashlib.sha256(file.read_bytes() + operators.encode()).hexdigest()
    for name in ("hf_config", "hf_text_config"):  # which tell where it lies
        setattr(placeless, name, _Placeless(getattr(config, name), config.model))
    return own(placeless)


def _compile_on_any_core(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set().union(*map(_cores_of, os.listdir("/proc/self/task"))))
    try:
        return own(*args, **options)
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
        return str(self._config.to_json_string()).replace(self._folder, "")
