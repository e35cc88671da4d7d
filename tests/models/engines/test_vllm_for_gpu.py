"""What an engine is told for a GPU, seen without one. None of it was run on a GPU."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from models import catalog
from models.core.throughput.cost import Cost, Time, save_cost
from models.engines.vllm import Params
from models.engines.vllm.fields import OPTIONS, DraftOptions, Setup
from models.engines.vllm.launch import RUNNER, VLLM_DRAFTS, Speculation, engine_arguments, scheduler_of
from models.engines.vllm.measuring import Times, measured_for, place_of
from models.engines.vllm.scheduler import AsyncDraftScheduler
from models.engines.vllm.tap import _Tap

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {}),
    ("cpu", {"tensor_parallel_size": 2}),
    ("NVIDIA L4", {}),
    ("NVIDIA H200", {}),
    ("NVIDIA H200", {"tensor_parallel_size": 2}),
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


def test_of_an_answer_that_vllm_drafted_by_itself_vllms_own_counts_are_told() -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    llm: Any = SimpleNamespace(rules=Params().rules, draft_version="1", speculating=True)
    tap = _Tap("a", params, DraftOptions("head"), llm)
    counted = SimpleNamespace(per_step_drafted=[3, 3], per_step_accepted=[2, 0])
    answer = SimpleNamespace(
        token_ids=[4, 5, 6, 7, 8], logprobs=None, finish_reason="length", spec_decode_metrics=counted
    )
    tap.see(SimpleNamespace(prompt_token_ids=[1, 2], outputs=[answer], kv_transfer_params=None, metrics=None))  # type: ignore[arg-type]
    found = tap.completion()
    assert (found.drafted, found.accepted, found.drafted_ids) == ((3, 3), (2, 0), ())
    assert found.trace("code").accepted == (2, 0)


def planned(target: Path, draft: Path, costs: Path, accelerator: str, extra: dict[str, Any]) -> Setup:
    params = Params(extra=extra)
    place = place_of(params, accelerator)
    _, setup = Speculation(target, draft, params, "bfloat16", True, costs, place=place).arguments()
    assert setup is not None
    return setup


def test_a_table_of_costs_is_that_of_one_accelerator_and_one_parallel_size(
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


def test_a_mode_is_chosen_by_times_of_the_same_accelerator_and_parallel_size(tiny_target: Path, tmp_path: Path) -> None:
    times = []
    for accelerator, extra in PLACES:
        place = place_of(Params(extra=extra), accelerator)
        facts = measured_for(tiny_target, None, "bfloat16", True, "1", place=place)
        times.append(Times(tmp_path, {True: facts}))
    times[0].keep(True, 12.5)
    assert [one.plain_ms(True) for one in times] == [12.5, *[None] * (len(PLACES) - 1)]
