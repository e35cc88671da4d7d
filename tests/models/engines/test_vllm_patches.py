"""What is changed of vLLM's inside: said where it is done, done when asked, and once."""

import ast
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ModelConfig
from vllm.v1.spec_decode.eagle import EagleProposer

from models.core.drafting.lookup import NgramIndex
from models.core.layers import quantized_weights
from models.engines.vllm import patches
from models.engines.vllm.patches import compiled, linear_kernels, replace, sampling
from models.engines.vllm.patches.proposer import DRAFTER_READS, READS, Planned
from models.engines.vllm.redraft_vllm.sampling import expand
from tests.imports import ROOT

NAMES = [module.name for module in pkgutil.iter_modules(patches.__path__)]
# What changes one model runner when a worker is asked to.
ASKED_FOR = ("fused_eagle3", "proposer", "switch")
TOLD = re.compile(
    r"\nReplaces: (?P<replaced>.+)\nTried with: vLLM [^\n]+\.\nNo hook: .+\nWithout it: .+\n$", flags=re.DOTALL
)
# Imports all, then installs all, and prints the symbols that are vLLM's own after each; then whether a model's class is
# looked at in this process.
TRIED = """
import importlib, os, pkgutil, sys
own = {symbol: pkgutil.resolve_name(symbol) for symbol in sys.argv[1].split()}
for name in ("worker", "engine", "scheduler", *("patches." + name for name in sys.argv[2].split())):
    importlib.import_module("models.engines.vllm." + name)
print(*(symbol for symbol, before in own.items() if pkgutil.resolve_name(symbol) is before))
importlib.import_module("models.engines.vllm.patches").install()
print(*(symbol for symbol, before in own.items() if pkgutil.resolve_name(symbol) is before))
print(importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess(os.getpid) == os.getpid())
"""


def replaced_by(name: str) -> list[str]:
    """Return the symbols that a file says it replaces; none where it does not say all that it is to say."""
    text = ast.get_docstring(ast.parse(Path(patches.__path__[0], f"{name}.py").read_text()), clean=False)
    told = TOLD.search(text or "")
    return re.findall(r"`((?:vllm|torch)\.[^`]+)`", told["replaced"]) if told else []


@pytest.mark.parametrize("name", NAMES)
def test_a_change_names_symbols_that_vllm_has_its_versions_why_no_hook_serves_and_what_is_lost_without_it(
    name: str,
) -> None:
    assert replaced_by(name)
    for symbol in replaced_by(name):
        pkgutil.resolve_name(symbol)


@pytest.mark.slow
def test_importing_replaces_nothing_and_one_call_replaces_what_the_files_say() -> None:
    symbols = {symbol for name in NAMES if name not in ASKED_FOR for symbol in replaced_by(name)}
    argv = [sys.executable, "-c", TRIED, " ".join(symbols), " ".join(NAMES)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    imported, installed, looked_at_here = done.stdout.splitlines()
    assert {*imported.split()} == symbols
    # Some products are replaced only on processors that lack instructions.
    assert not {*installed.split()} - {one for one in symbols if "CPUInt8ScaledMM" in one}
    assert looked_at_here == "True"


def test_a_change_that_only_costs_speed_is_left_out_whole_and_the_log_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attention = pkgutil.resolve_name("vllm.model_executor.layers.attention.Attention")
    own = attention.forward
    monkeypatch.delattr("vllm.forward_context.override_forward_context")  # the last of three
    patches.make("models.engines.vllm.patches.attention")
    assert attention.forward is own
    (told,) = caplog.messages
    assert told.startswith(
        "patch attention is off, vLLM has another layout: module 'vllm.forward_context' has no attribute"
    )
    assert "Without it: 2.5 ms more of a forward pass" in told


def test_a_change_without_which_answers_would_be_wrong_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.renderers.online_renderer._reused_prompt_token_ids")
    with pytest.raises(
        ValueError, match="patch renderer does not fit the vLLM that is installed, and is needed: module"
    ):
        patches.make("models.engines.vllm.patches.renderer")


def test_each_change_that_is_made_at_the_start_has_a_file() -> None:
    made = {name.rpartition(".")[2] for names in patches.CHANGES.values() for name in names}
    assert made == {*NAMES} - {*ASKED_FOR}
    assert made > patches.OPTIONAL


def test_a_second_worker_in_the_process_puts_nothing_around_what_was_replaced() -> None:
    def doubled(own: Callable[[int], int], number: int) -> int:
        return 2 * own(number)

    def increased(own: Callable[[int], int], number: int) -> int:
        return own(number) + 1

    library: Any = SimpleNamespace(count=lambda number: number)
    for new in (doubled, increased, doubled):
        replace(library, "count", new)
    assert library.count(3) == 7


def test_no_class_is_swapped_under_an_object() -> None:
    for file in sorted((ROOT / "models").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        stored = [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        assert "__class__" not in stored, file


@pytest.mark.parametrize(
    ("values", "ends", "wanted"),
    [([0.5, 0.0, 2.0], [2, 3, 6], [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]), ([3.0, 4.0], [0, 2], [4.0, 4.0])],
    ids=["in place", "none for a request without drafted tokens"],
)
def test_values_are_repeated_over_the_drafted_tokens(values: list[float], ends: list[int], wanted: list[float]) -> None:
    output = torch.full((len(wanted),), -1.0)
    expand(output, torch.tensor(values), torch.tensor(ends, dtype=torch.int32), 0, 1)
    assert output.tolist() == wanted


def test_a_step_that_verifies_nothing_has_no_tokens_to_constrain(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest_first(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
        return logits.topk(int(k.max())).values

    monkeypatch.setattr(sampling, "_is_built", lambda: False)
    assert sampling.keep_likeliest(largest_first, torch.empty(0, 7), torch.empty(0), None).shape == (0, 7)
    assert sampling.keep_likeliest(largest_first, torch.tensor([[1.0, 3.0]]), torch.tensor([1]), None).tolist() == [
        [3.0]
    ]


def bare() -> Any:
    """Return a proposer of vLLM that was not set up, so that it has its class's attributes alone."""
    return object.__new__(EagleProposer)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (SimpleNamespace(drafter=object()), r"vLLM drafts by object; another release"),
        (SimpleNamespace(drafter=bare()), r"SimpleNamespace has no input_batch; another release"),
        (SimpleNamespace(drafter=bare(), **dict.fromkeys(READS)), r"EagleProposer has no _enable_probabilistic_draft_"),
    ],
)
def test_a_vllm_of_another_layout_is_refused_in_one_line_and_left_as_it_was(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        Planned(given, NgramIndex(shortest=3, longest=16, capacity=0))
    assert "\n" not in str(refused.value)
    assert "propose" not in getattr(given.drafter, "__dict__", {})
    assert given.__dict__.get("propose_draft_token_ids") is None


def test_where_all_is_there_the_proposer_is_planned_and_still_vllms() -> None:
    given = SimpleNamespace(drafter=bare(), **dict.fromkeys(READS))
    given.speculative_config = SimpleNamespace(disable_padded_drafter_batch=False)
    given.drafter.__dict__ |= dict.fromkeys(DRAFTER_READS[3:])
    planned = Planned(given, NgramIndex(shortest=3, longest=16, capacity=0))
    assert type(given.drafter) is EagleProposer
    assert given.drafter.propose == planned.propose
    assert given.propose_draft_token_ids == planned.propose_unless_it_rests
    assert given.speculative_config.disable_padded_drafter_batch


def load(monkeypatch: pytest.MonkeyPatch, function: Any) -> Any:
    """Load a function by what torch has after `install`, in place of reading it from a file."""
    loaded = SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda file: loaded)
    compiled.install()
    return torch.compiler.load_compiled_function("file")._artifacts.compiled_fn


def test_a_plain_function_has_nothing_to_finalize_and_what_finalizes_itself_still_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = load(monkeypatch, lambda: "ran")
    assert (plain.finalize_loading("config"), plain()) == (None, "ran")
    once = torch.compiler.load_compiled_function
    compiled.install()  # as a second worker in the process does
    assert torch.compiler.load_compiled_function is once
    own = load(monkeypatch, SimpleNamespace(finalize_loading=lambda config: config))
    assert own.finalize_loading("config") == "config"


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


@pytest.mark.parametrize(
    ("change", "grid"),
    [
        *(({"num_hidden_layers": 3}, False), ({"rms_norm_eps": 0.5}, False), ({"redraft": {"family": "other"}}, False)),
        ({}, True),
    ],
)
def test_another_shape_and_a_grid_beside_the_weights_have_graphs_of_their_own(
    tiny_target: Path, tmp_path: Path, change: dict[str, Any], grid: bool
) -> None:
    compiled.install()
    other = shutil.copytree(tiny_target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    (other / (quantized_weights.FILE if grid else "none")).touch()
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


def test_weights_that_this_processor_would_saturate_are_refused() -> None:
    linear_kernels.require_unsaturated(torch.tensor([[63, -63]], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"weights go up to 128, .* beyond 63; .*weight_bits = 7"):
        linear_kernels.require_unsaturated(torch.tensor([[63, -128]], dtype=torch.int8))


# Prints a line of oneDNN's own for each product that is prepared, and one between two rounds of 100 numbers of rows.
ROUNDS = """
import torch
import vllm._C
from vllm import _custom_ops as ops
from models.engines.vllm.patches import linear_kernels
linear_kernels.install()
layer = ops.create_onednn_mm(torch.randn(64, 64).t(), 32)  # as many as vLLM asks for
for _ in range(2):
    print("a round begins", flush=True)
    for num in range(1, 101):
        ops.onednn_mm(layer, torch.randn(num, 64), None)
"""


@pytest.mark.engine
def test_a_layer_keeps_what_it_prepared_for_each_number_of_rows() -> None:
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    _, first, second = (part.count(",create:") for part in done.stdout.split("a round begins"))
    assert first >= 100
    assert second == 0
