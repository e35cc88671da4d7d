"""What is changed of vLLM's inside: said where it is done, done when asked, and once."""

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.engines.vllm import patches
from models.engines.vllm.patches import replace
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
    attention, context = map(
        pkgutil.resolve_name, ("vllm.model_executor.layers.attention.Attention", "vllm.forward_context")
    )
    own = attention.forward
    monkeypatch.delattr(context, "override_forward_context")  # the last of three
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
