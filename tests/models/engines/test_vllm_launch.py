"""What an engine is started with: arguments and tool parsers of the installed vLLM, mode, and settings for a GPU.

For a GPU it is seen without one; none of that was run on one.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import _VLLM_MODELS
from vllm.tool_parsers import ToolParserManager
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.structured_output import StructuredOutputManager

from models import catalog
from models.core.throughput.cost import Cost, Time, save_cost
from models.engines.vllm import OWNED, Params, hands_out_states, lacks_to_share, offered_arguments, tool_parsers
from models.engines.vllm.fields import OPTIONS, DraftOptions, Setup
from models.engines.vllm.launch import RUNNER, VLLM_DRAFTS, Speculation, engine_arguments, scheduler_of
from models.engines.vllm.measuring import Times, mode_of, place_of
from models.engines.vllm.scheduler import AsyncDraftScheduler
from tests.models.changed import parsed, require_refused
from tests.models.families import CAUSAL


def test_the_arguments_are_those_of_the_installed_engine() -> None:
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert offered_arguments() == fields
    assert OWNED.keys() - fields == {"enable_auto_tool_choice", "tool_call_parser"}


def test_the_tool_parsers_are_those_of_the_installed_engine() -> None:
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
    module, name = _VLLM_MODELS[architecture]
    model = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    assert hands_out_states(architecture) is bool(supports_eagle3(model)) is hands_out


def test_what_the_engine_has_no_class_for_runs_as_transformers_own() -> None:
    assert hands_out_states("NobodyForCausalLM")


@pytest.mark.parametrize("model_type", ["phi", "olmo2", "gpt_neox", "gemma2"])
def test_the_embedding_that_a_draft_would_share_is_told_as_the_installed_engine_finds_it(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(model_type, **CAUSAL[model_type])
    with torch.device("meta"):
        target, draft = AutoModel.from_config(config), nn.Module()
    draft.model, draft.has_own_embed_tokens = nn.Module(), False
    draft.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
    monkeypatch.setattr(llm_base_proposer, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    share, fault = llm_base_proposer.SpecDecodeBaseProposer._maybe_share_embeddings, lacks_to_share(config)
    if "no embed_tokens" in fault:
        with pytest.raises(AttributeError, match="embed_tokens"):
            share(SimpleNamespace(model=draft), SimpleNamespace(model=target))
        return
    share(SimpleNamespace(model=draft), SimpleNamespace(model=target))
    assert draft.model.embed_tokens is target.embed_tokens
    assert (type(draft.model.embed_tokens) is nn.Embedding) is (fault == "")


@pytest.mark.parametrize(
    "keys",
    [
        {"extra": {"enable_prefix_caching": False, "gpu_memory_utilization": 0.7}},
        {"num_draft_tokens": 0, "extra": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}},
    ],
    ids=["arguments", "a way of drafting that is vLLM's, with no draft of ours"],
)
def test_further_arguments_are_passed_through(keys: dict[str, Any]) -> None:
    params: Any = catalog.parse("engines", {"name": "vllm", **keys})
    assert params.extra == keys["extra"]


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


def test_a_recipe_names_a_tool_parser_of_the_engine() -> None:
    for name in ("auto", "hermes"):
        assert parsed({"serve.tool_parser": name}).serve.tool_parser == name
    require_refused({"serve.tool_parser": "herms"}, r'no tool_parser "herms" \(did you mean "hermes"\?\); .*pythonic')


def test_looking_them_up_imports_no_vllm() -> None:
    code = (
        "import sys; from models.engines.vllm import Params, require_tool_parser\n"
        "Params(extra={'seed': 1}); require_tool_parser('hermes'); print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "False False\n"
    )


HOLDS = {True: "here, eager", False: "here, compiled"}
UNKNOWN = Times(None, HOLDS)


def target(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


PACKED = {"quantization_config": {"quant_method": "compressed-tensors"}}


@pytest.mark.parametrize(
    ("serves", "dtype", "config", "eager"),
    [
        (True, "bfloat16", {}, False),
        (True, "float32", {}, False),
        (True, "bfloat16", PACKED, False),
        (True, "float32", PACKED, True),
        (False, "bfloat16", {}, True),
    ],
)
def test_what_serves_is_compiled_unless_its_packed_weights_need_eager_products(
    tmp_path: Path, serves: bool, dtype: str, config: dict[str, Any], eager: bool
) -> None:
    assert mode_of(Params(), target(tmp_path, **config), dtype, serves, UNKNOWN).eager is eager


@pytest.mark.parametrize("eager", [True, False])
def test_a_recipe_decides_where_it_says_so(tmp_path: Path, eager: bool) -> None:
    for serves in (True, False):
        mode = mode_of(Params(enforce_eager=eager), target(tmp_path), "bfloat16", serves, UNKNOWN)
        assert mode.eager is eager
        assert str(mode) == f"{'eager' if eager else 'compiled'}: [engine] enforce_eager says so"


@pytest.mark.parametrize(
    ("measured", "eager", "why"),
    [
        ({True: 21.0, False: 13.5}, False, "a plain step takes 13.5 ms here, 21.0 eager"),
        ({True: 13.5, False: 21.0}, True, "a plain step takes 13.5 ms here, 21.0 compiled"),
        ({True: 13.5}, False, "compiled steps were faster wherever both were tried; here they were not both measured"),
    ],
)
def test_what_serves_runs_as_was_faster_here(
    tmp_path: Path, measured: dict[bool, float], eager: bool, why: str
) -> None:
    times = Times(tmp_path / "costs", HOLDS)
    for of_eager, ms in measured.items():
        times.keep(of_eager, ms)
    later = Times(tmp_path / "costs", HOLDS)
    mode = mode_of(Params(), target(tmp_path), "bfloat16", True, later)
    assert mode.eager is eager and mode.why.startswith(why)
    assert mode_of(Params(), target(tmp_path), "bfloat16", False, later).eager


@pytest.mark.parametrize("content", ["", '{"measured_for": "elsewhere", "plain_ms": 1}', '{"plain_ms": -1}'])
def test_a_time_of_another_machine_and_a_torn_one_are_measured_anew(tmp_path: Path, content: str) -> None:
    times = Times(tmp_path, HOLDS)
    times.keep(True, 13.5)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert times.plain_ms(eager=True) is None


PLACES: list[tuple[str, dict[str, Any]]] = [
    *(("cpu", {}), ("NVIDIA L4", {}), ("NVIDIA H200", {})),
    *(("cpu", {"tensor_parallel_size": 2}), ("NVIDIA H200", {"tensor_parallel_size": 2})),
    ("NVIDIA H200", {"pipeline_parallel_size": 2}),
]
BLOCK, K = 16, 3
PINNED = {"worker_cls", "scheduler_cls", "async_scheduling", "distributed_executor_backend"}


def on_gpu(target: Path, draft: Path | None, **said: Any) -> Speculation:
    params = Params(num_draft_tokens=K, max_model_len=256, **said)
    return Speculation(target, draft, params, "bfloat16", True, None, on_gpu=True)


def settled(wanted: Speculation) -> VllmConfig:
    """Return what vLLM makes of the arguments, with the scheduling that it settles on for a GPU."""
    arguments, _ = engine_arguments(wanted, "target")
    config = AsyncEngineArgs(**arguments, block_size=BLOCK).create_engine_config()
    config.scheduler_config.async_scheduling = True  # a CPU's platform has the last word, and says no
    return config


def test_on_a_gpu_vllm_drafts_as_in_a_server_that_the_plugin_is_in(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    wanted = on_gpu(tiny_target, tiny_draft)
    arguments, setup = engine_arguments(wanted, "target")
    assert (setup, wanted.why_unplanned()) == (None, VLLM_DRAFTS)
    assert not PINNED & arguments.keys()
    assert arguments["worker_extension_cls"] == "models.engines.vllm.redraft_vllm.worker.DraftExtension"
    assert arguments["speculative_config"]["num_speculative_tokens"] == K
    assert arguments["per_request_spec_decode_metrics"] == "detailed"
    config = settled(wanted)
    assert RUNNER not in os.environ
    assert config.speculative_config is not None and not config.speculative_config.disable_padded_drafter_batch
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert scheduler_of(config).endswith(".AsyncDraftScheduler")
    config.scheduler_config.async_scheduling = False  # as for Medusa, which vLLM drafts with in turn
    assert scheduler_of(config).endswith(".TracingScheduler")


def test_steps_are_planned_on_a_gpu_where_the_recipe_says_so_and_on_a_cpu_unless_it_says_not(
    tiny_target: Path, tiny_draft: Path
) -> None:
    planned = on_gpu(tiny_target, tiny_draft, plan_steps=True)
    for one in (planned, planned._replace(params=Params(num_draft_tokens=K), on_gpu=False)):
        arguments, setup = engine_arguments(one, "target")
        assert setup is not None and arguments.keys() >= PINNED
        assert arguments["async_scheduling"] is False and "worker_extension_cls" not in arguments
    never = on_gpu(tiny_target, tiny_draft, plan_steps=False)._replace(on_gpu=False)
    assert engine_arguments(never, "target")[1] is None
    assert never.why_unplanned() == "[engine] plan_steps is false"


@pytest.mark.parametrize(
    ("said", "plans", "gpu", "drawn"),
    [
        ("auto", "auto", False, "probabilistic"),
        ("probabilistic", "auto", False, "probabilistic"),
        ("auto", False, False, "greedy"),
        ("greedy", False, False, "greedy"),
        ("greedy", "auto", False, "greedy"),
        ("probabilistic", False, True, "probabilistic"),
        ("auto", "auto", True, "probabilistic"),
    ],
)
def test_drafts_are_drawn_as_said(
    tiny_target: Path, tiny_draft: Path, said: str, plans: bool | str, gpu: bool, drawn: str
) -> None:
    wanted = on_gpu(tiny_target, tiny_draft, plan_steps=plans, draft_sample_method=said)._replace(on_gpu=gpu)
    arguments, _ = wanted.arguments()
    assert arguments["speculative_config"]["draft_sample_method"] == drawn
    assert gpu or wanted.params.rules.draws == (drawn == "probabilistic")


def test_drafts_that_can_not_be_drawn_by_the_targets_noise_are_refused(tiny_target: Path, tiny_draft: Path) -> None:
    wanted = on_gpu(tiny_target, tiny_draft, plan_steps=False, draft_sample_method="probabilistic")
    with pytest.raises(ValueError, match=r'draft_sample_method "probabilistic" .* plan_steps is false'):
        wanted._replace(on_gpu=False).arguments()


def test_an_engine_is_spread_over_as_many_gpus_as_it_is_told() -> None:
    assert Params().num_devices == 1
    assert Params(extra={"tensor_parallel_size": 2, "pipeline_parallel_size": 3}).num_devices == 6


def test_what_only_a_planned_step_reads_is_refused_where_none_is(tiny_target: Path, tiny_draft: Path) -> None:
    lookup = {"num_tokens": 4}
    with pytest.raises(ValueError, match=f'key "lookup" would do nothing, since {VLLM_DRAFTS.replace("[", ".")[:20]}'):
        engine_arguments(on_gpu(tiny_target, tiny_draft, lookup=lookup), "target")
    with pytest.raises(ValueError, match='key "lookup" would do nothing, since plan_steps is false'):
        catalog.parse("engines", {"name": "vllm", "plan_steps": False, "lookup": lookup})


def request(name: str, drafting: str) -> Request:
    params = SamplingParams(max_tokens=40, temperature=0, extra_args={OPTIONS: DraftOptions(drafting)})
    params.update_from_generation_config({}, 2)
    return Request(name, [*range(3, 51)], params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def test_an_asynchronous_step_drafts_for_whom_it_is_to_and_a_swap_forgets_what_is_cached(
    tiny_target: Path, tiny_draft: Path
) -> None:
    init_none_hash(sha256)
    config = settled(on_gpu(tiny_target, tiny_draft))
    config.cache_config.num_gpu_blocks = 100
    of_layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    blocks = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], of_layer)])
    scheduler = AsyncDraftScheduler(config, blocks, StructuredOutputManager(config), BLOCK)
    for name, drafting in (("drafted", "head"), ("plain", "off")):
        scheduler.add_request(request(name, drafting))

    def step() -> dict[str, list[int]]:
        output = scheduler.schedule()
        names = [*output.num_scheduled_tokens]
        said = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, [[7] for _ in names])
        scheduler.update_from_output(output, said)
        return output.scheduled_spec_decode_tokens

    assert step() == {}  # it reads the prompts
    assert [step() for _ in range(3)] == [{"drafted": [-1] * K}] * 3
    cached = scheduler.kv_cache_manager.get_computed_blocks(request("later", "head"))
    assert cached[1] >= BLOCK
    assert scheduler.reset_prefix_cache()  # though requests run
    for _ in range(30):
        step()
        assert scheduler.kv_cache_manager.get_computed_blocks(request("later", "head"))[1] == 0
    assert len(scheduler.running) == 2


def planned(target: Path, draft: Path, costs: Path, accelerator: str, extra: dict[str, Any]) -> Setup:
    params = Params(extra=extra)
    place = place_of(params, accelerator)
    _, setup = Speculation(target, draft, params, "bfloat16", True, costs, place=place).arguments()
    assert setup is not None
    return setup


def test_what_steps_take_is_that_of_one_accelerator_and_one_parallel_size(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    setups = [planned(tiny_target, tiny_draft, tmp_path, *place) for place in PLACES]
    assert len({setup.costs for setup in setups}) == len(PLACES)
    for setup in setups:
        assert setup.costs is not None
        save_cost(Cost.measured([Time(1, 1, 0, 10.0)], setup.measured_for), setup.costs)
        assert setup.known_cost() is not None
        others = [replace(other, costs=setup.costs) for other in setups if other is not setup]
        assert all(other.known_cost() is None for other in others)  # a file that was copied tells of itself
    more = planned(tiny_target, tiny_draft, tmp_path, "cpu", {"gpu_memory_utilization": 0.8})
    assert more.costs == setups[0].costs
    times = [Times(tmp_path, {True: setup.measured_for}) for setup in setups]
    times[0].keep(True, 12.5)  # of a plain step, by which the mode is chosen
    assert [one.plain_ms(True) for one in times] == [12.5, *[None] * (len(PLACES) - 1)]
