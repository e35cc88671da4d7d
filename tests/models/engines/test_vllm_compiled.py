"""What was compiled is loaded again: named by the models' shapes, as a function that vLLM can finalize."""

import inspect
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ModelConfig

from models.core.layers import quantized_weights
from models.engines.vllm.patches import compiled


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


def graph_of(directory: Path) -> str:
    """Return what vLLM names a model's graph by."""
    return ModelConfig(model=str(directory), max_model_len=64, dtype="float32").compute_hash()


def test_models_of_one_shape_share_their_graph_wherever_they_lie(tiny_target: Path, tmp_path: Path) -> None:
    unpatched = inspect.unwrap(ModelConfig.compute_hash)
    compiled.install()
    again = shutil.copytree(tiny_target, tmp_path / "again")
    (again / "model.safetensors").write_bytes(b"other weights")
    assert graph_of(again) == graph_of(tiny_target)
    with pytest.MonkeyPatch.context() as patch:  # else it would not be this patch that makes them equal
        patch.setattr(ModelConfig, "compute_hash", unpatched)
        assert graph_of(again) != graph_of(tiny_target)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"rms_norm_eps": 0.5}, {"redraft": {"family": "other"}}])
def test_another_shape_has_a_graph_of_its_own(tiny_target: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    compiled.install()
    other = shutil.copytree(tiny_target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    assert graph_of(other) != graph_of(tiny_target)


def test_a_grid_beside_the_weights_has_a_graph_of_its_own(tiny_target: Path, tmp_path: Path) -> None:
    compiled.install()
    other = shutil.copytree(tiny_target, tmp_path / "other")
    (other / quantized_weights.FILE).touch()
    assert graph_of(other) != graph_of(tiny_target)


def test_a_thread_that_compiles_may_run_on_each_core_of_its_process_and_is_pinned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned, seen = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # tests beside others are pinned to one
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core: there is no other to go to")

    def compiles(self: object, number: int) -> int:
        seen.append(os.sched_getaffinity(0))
        return number

    monkeypatch.setattr(TorchCompileWithNoGuardsWrapper, "aot_compile", compiles)
    compiled.install()
    other = threading.Event()
    threading.Thread(target=other.wait, daemon=True).start()  # a thread of the process that is pinned to none
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert TorchCompileWithNoGuardsWrapper.aot_compile(None, 3) == 3
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, pinned)
        other.set()
    assert seen == [cores]
