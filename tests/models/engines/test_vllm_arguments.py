"""Engine arguments and tool parsers, checked before an engine starts and without importing vLLM."""

import dataclasses
import subprocess
import sys
from importlib import import_module

import pytest

from models import catalog
from models.engines.vllm import OWNED, Params
from models.engines.vllm.installed import engine_arguments, hands_out_states, tool_parsers
from models.recipe import load_recipe, parse_recipe


def test_the_arguments_are_those_of_the_installed_engine() -> None:
    from vllm import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert engine_arguments() == fields
    assert OWNED.keys() - fields == {"enable_auto_tool_choice", "tool_call_parser"}


def test_the_tool_parsers_are_those_of_the_installed_engine() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert tool_parsers() == set(ToolParserManager.list_registered())


@pytest.mark.parametrize(
    ("architecture", "hands_out"),
    [
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),  # by the class that it derives from, in another file
        ("Phi3ForCausalLM", True),
        ("GPTNeoXForCausalLM", True),  # transformers' own model in a class of vLLM's
        ("GPT2LMHeadModel", False),
        ("GemmaForCausalLM", False),
    ],
)
def test_a_class_that_hands_out_states_is_told_as_the_installed_engine_tells_it(
    architecture: str, hands_out: bool
) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import _VLLM_MODELS

    module, name = _VLLM_MODELS[architecture]
    model = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    assert hands_out_states(architecture) is bool(supports_eagle3(model)) is hands_out


def test_what_the_engine_has_no_class_for_runs_as_transformers_own() -> None:
    assert hands_out_states("NobodyForCausalLM")


def test_further_arguments_are_passed_through() -> None:
    table = {"name": "vllm", "extra": {"enable_prefix_caching": False, "gpu_memory_utilization": 0.7}}
    params = catalog.parse("engines", table)
    assert isinstance(params, Params)
    assert params.extra == table["extra"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gpu_memory_utilisation", r'no argument "gpu_memory_utilisation"; did you mean gpu_memory_utilization'),
        ("zzzzzzzzzzz", r'engines.vllm: key "extra": .*no argument "zzzzzzzzzzz"$'),
        ("speculative_config", r'"speculative_config" can\'t be passed to the engine: set num_draft_tokens'),
        ("worker_extension_cls", r'"worker_extension_cls" can\'t be passed to the engine: drafts are swapped'),
        ("max_model_len", r'"max_model_len" can\'t be passed to the engine: set the key of that name in \[engine\]'),
        ("trust_remote_code", r"code out of a model's directory is never run"),
        ("tool_call_parser", r"set tool_parser in \[serve\]"),
    ],
)
def test_an_argument_that_is_unknown_or_taken_is_refused_by_name(name: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        catalog.parse("engines", {"name": "vllm", "extra": {name: 1}})


def test_a_way_of_drafting_that_is_the_engines_own_goes_with_no_draft_of_ours() -> None:
    own = {"method": "ngram", "num_speculative_tokens": 3}
    params = catalog.parse("engines", {"name": "vllm", "num_draft_tokens": 0, "extra": {"speculative_config": own}})
    assert isinstance(params, Params)
    assert params.extra["speculative_config"] == own


def recipe_with(**tables: dict[str, object]) -> dict[str, object]:
    recipe = load_recipe("tiny").model_dump(mode="json", exclude_none=True)
    return {**recipe, **{name: {**recipe[name], **table} for name, table in tables.items()}}


def test_a_recipe_names_a_tool_parser_of_the_engine() -> None:
    for name in ("auto", "hermes"):
        assert parse_recipe(recipe_with(serve={"tool_parser": name}), "mine.toml").serve.tool_parser == name
    with pytest.raises(ValueError, match=r'no tool_parser "herms" \(did you mean "hermes"\?\); there are: .*pythonic'):
        parse_recipe(recipe_with(serve={"tool_parser": "herms"}), "mine.toml")


def test_the_reference_engine_takes_no_tools() -> None:
    recipe = recipe_with(serve={"tool_parser": "hermes"})
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        parse_recipe({**recipe, "engine": {"name": "torch"}}, "mine.toml")


def test_looking_them_up_imports_no_vllm() -> None:
    code = (
        "import sys; from models.engines.vllm import Params, require_tool_parser\n"
        "Params(extra={'seed': 1}); require_tool_parser('hermes'); print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "False False\n"
    )
