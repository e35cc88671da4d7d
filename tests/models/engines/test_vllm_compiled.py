"""What was compiled is loaded again: the function that torch hands out must be one that vLLM can finalize."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.engines.vllm import compiled


def load(monkeypatch: pytest.MonkeyPatch, function: Any) -> Any:
    """Load a function by what torch has after `install`, in place of reading it from a file."""
    loaded = SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda file: loaded)
    compiled.install()
    return torch.compiler.load_compiled_function("file")._artifacts.compiled_fn


def test_a_plain_function_has_nothing_to_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> str:
        return "ran"

    loaded = load(monkeypatch, function)
    assert loaded.finalize_loading("config") is None
    assert loaded() == "ran"


def test_what_finalizes_itself_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        def finalize_loading(self, config: str) -> str:
            return config

    assert load(monkeypatch, Function()).finalize_loading("config") == "config"


def test_a_second_worker_in_the_process_puts_nothing_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, lambda: None)
    once = torch.compiler.load_compiled_function
    compiled.install()
    assert torch.compiler.load_compiled_function is once
