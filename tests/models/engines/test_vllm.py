"""The vLLM engine: same output with and without a draft, honest counts, whole swaps, sampling as a law, events."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from models.core.evaluation.golden import Golden, near_tie_threshold
from models.drafts import eagle3
from models.engines import Completion, LookUp, Sampling, Way
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.redraft_vllm.swapper import Order
from models.engines.vllm.tap import MOST_MERGED, EngineEnded
from models.engines.vllm.worker import DraftWorker
from models.lengths import fixed
from models.targets import random
from tests.conftest import make_draft
from tests.models.engines.answers import (
    answer_all,
    golden_of,
    num_scored_alike,
    require_none_different,
    require_steps,
)
from tests.models.engines.sampled import p_value
from tests.models.engines.started import Loop, running

pytestmark = pytest.mark.engine

ALPHA = 1e-4
TEMPERATURE = 0.8
Reference = tuple[list[Golden], float]


def prompts(count: int) -> list[list[int]]:
    """One start that the prefix cache holds, and 8 to 16 tokens of its own each."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, 67, size=64).tolist()
    return [start + rng.integers(3, 67, size=8 + number % 9).tolist() for number in range(count)]


@pytest.fixture(scope="module")
def reference(engine: VllmEngine, loop: Loop) -> Reference:
    """Outputs without speculation, and the near-tie threshold from two more batch sizes."""

    async def run() -> Reference:
        await engine.set_speculation(False)
        greedy = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2)
        first = await answer_all(engine, prompts(20), greedy, 1, "reference")
        again = [await answer_all(engine, prompts(20), greedy, n, f"batch{n}") for n in (4, 16)]
        await engine.set_speculation(True)
        return golden_of(first), near_tie_threshold(golden_of(first), again)

    return loop.run_until_complete(run())


def require_equal(reference: Reference, outputs: Sequence[Completion]) -> None:
    golden, threshold = reference
    require_none_different(golden, outputs, threshold, least_equal=0.8)


GREEDY = Sampling(max_tokens=32, ignore_eos=True)


async def test_the_first_token_is_told_of_once_and_before_the_others(engine: VllmEngine) -> None:
    told: list[float] = []
    completion = await engine.generate(prompts(1)[0], GREEDY, "told", lambda: told.append(time.monotonic()))
    ended_s = time.monotonic()
    assert len(told) == 1
    assert ended_s - told[0] > completion.per_token_ms / 1000


@pytest.fixture(scope="module")
def alone(engine: VllmEngine, loop: Loop) -> list[Completion]:
    """Answers with the draft, one after the other."""
    return loop.run_until_complete(answer_all(engine, prompts(20), GREEDY, 1, "alone"))


async def test_greedy_output_with_a_draft_is_the_targets_own(
    engine: VllmEngine, reference: Reference, alone: list[Completion]
) -> None:
    together = await answer_all(engine, prompts(20), GREEDY, 8, "together")
    for outputs in (alone, together):
        require_equal(reference, outputs)
        assert all(max(one.drafted) == 3 for one in outputs)


def test_every_step_is_counted_and_its_tokens_add_up_and_scores_without_an_engine_are_the_engines_counts(
    alone: list[Completion], tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    require_steps(alone)
    # Near-ties of the draft may move a count.
    assert num_scored_alike(eagle3.load(tiny_draft, tiny_target), tiny_target, alone, tmp_path) >= 18


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_an_answer_tells_when_its_tokens_came_also_one_that_comes_whole(
    engine: VllmEngine, kind: RequestOutputKind
) -> None:
    wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, output_kind=kind)
    async for output in engine.llm.generate({"prompt_token_ids": prompts(1)[0]}, wanted, f"timed-{kind}"):
        last = output
    completion: Completion = last.completion
    assert completion.first_token_ms > 0
    assert completion.per_token_ms > 0


async def test_a_request_that_starts_as_a_swap_ends_has_the_new_drafts_label_also_where_nobody_waits_any_longer(
    engine: VllmEngine, tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, update = make_draft(tiny_target, tmp_path, seed=7), engine.llm.update_weight_version
    started: list[Completion] = []

    async def answered_meanwhile(version: str) -> None:
        started.append(await engine.generate(prompts(1)[0], GREEDY, f"meanwhile-{version}"))
        await update(version)

    async def hangs(version: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine.llm, "update_weight_version", answered_meanwhile)
    await engine.swap_draft(other, "other")
    monkeypatch.setattr(engine.llm, "update_weight_version", hangs)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.swap_draft(tiny_draft, "late"), 3)
    started.append(await engine.generate(prompts(1)[0], GREEDY, "after"))
    await engine.check_draft(tiny_draft)
    assert [one.draft_version for one in started] == ["other", "late"]
    assert (engine.draft_version, engine.draft) == ("late", tiny_draft)


async def test_the_engine_is_called_once_a_draft_is_read_and_checked(
    engine: VllmEngine, tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other, commit = make_draft(tiny_target, tmp_path / "other", seed=7), engine._swapper.commit

    async def vanish(order: Order) -> bool:
        shutil.move(f"{order.path}/model.safetensors", tmp_path)
        return await commit(order)

    with monkeypatch.context() as patch:
        patch.setattr(engine._swapper, "commit", vanish)
        await engine.swap_draft(other, "vanished")
    with pytest.raises(ValueError, match="of the loaded draft is off by"):
        await engine.check_draft(tiny_draft)
    await engine.swap_draft(tiny_draft, "1")
    assert await engine.check_draft(tiny_draft) < 0.05


def spoiled(draft: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Return a copy of a draft with other weights."""
    shutil.copytree(draft, folder)
    weights = {name: one.clone() for name, one in load_file(draft / "model.safetensors").items()}
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


SPOILED: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "nan": lambda weights: weights["fc.weight"][0].fill_(float("nan")),
    "missing": lambda weights: weights.pop("norm.weight"),
    "extra": lambda weights: weights.update(surprise=torch.zeros(2)),
    "shape": lambda weights: weights.update({"norm.weight": weights["norm.weight"][:4].clone()}),
}


async def test_a_spoiled_file_is_refused_and_serving_goes_on(
    engine: VllmEngine, reference: Reference, tiny_draft: Path, tmp_path: Path
) -> None:
    version = engine.draft_version
    for size in (3000, 0):
        cut = shutil.copytree(tiny_draft, tmp_path / f"cut to {size}")
        os.truncate(cut / "model.safetensors", size)
        with pytest.raises(ValueError):
            await engine.swap_draft(cut, "spoiled")
    for fault, change in SPOILED.items():
        with pytest.raises(ValueError):
            await engine.swap_draft(spoiled(tiny_draft, tmp_path / fault, change), "spoiled")
        assert engine.draft_version == version
    require_equal(reference, await answer_all(engine, prompts(20), GREEDY, 8, "after"))


async def test_a_draft_that_computes_nan_though_its_weights_are_finite_changes_no_output_and_is_found(
    engine: VllmEngine, reference: Reference, tiny_draft: Path, tmp_path: Path
) -> None:
    # A product of it overflows, and a norm makes NaN of that.
    draft = spoiled(tiny_draft, tmp_path / "draft", lambda weights: weights["fc.weight"].fill_(3e38))
    sampled = Sampling(temperature=TEMPERATURE, max_tokens=32, seed=1, ignore_eos=True)
    await engine.swap_draft(draft, "overflows")
    try:
        with pytest.raises(ValueError, match="of the loaded draft is off by"):
            await engine.check_draft(draft)
        greedy = await answer_all(engine, prompts(20), GREEDY, 8, "overflows")
        drawn = await answer_all(engine, prompts(20), sampled, 8, "overflows-sampled")
    finally:
        await engine.swap_draft(tiny_draft, "1")
    require_equal(reference, greedy)
    assert all(len(output.token_ids) == 32 and output.finish_reason == "length" for output in drawn)


# Sampling: all tokens but the first ones of so many answers to a prompt; a right engine fails once in 10,000 runs.
NUM_DRAWS, NUM_DRAWN = 250, 12
SAMPLED = Sampling(temperature=TEMPERATURE, max_tokens=NUM_DRAWN, ignore_eos=True)


@pytest.fixture(scope="module")
def sampling_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Peaked enough that most of the mass lies in few tokens."""
    directory = tmp_path_factory.mktemp("sampling")
    random.build(random.Params(init_std=0.12, seed=3), directory)
    return directory


def draw(loop: Loop, engine: VllmEngine, way: Way, tag: str) -> list[Completion]:
    asked, sampling = [[5, 9, 30, 41, 12, 60]] * NUM_DRAWS, SAMPLED.model_copy(update={"drafting": way})
    return loop.run_until_complete(answer_all(engine, asked, sampling, NUM_DRAWS, tag))


def p_value_of(target: Path, answers: Sequence[Completion]) -> float:
    return p_value(target, answers[0].prompt_ids, [one.token_ids for one in answers], SAMPLED)


def test_sampled_tokens_follow_the_targets_distribution_with_certain_drafts_and_where_look_up_drafts(
    loop: Loop, sampling_target: Path, tmp_path: Path
) -> None:
    """Of q that is told: test_vllm_planned_families."""
    draft = make_draft(sampling_target, tmp_path, seed=0)
    lookup = LookUp(num_tokens=4, shortest=1, remembered=100_000)
    keys = {"draft_sample_method": "greedy", "lengths": fixed.Params(), "lookup": lookup, "max_num_seqs": NUM_DRAWS}
    with running(loop, sampling_target, draft, **keys) as engine:
        by_head = draw(loop, engine, "head", "head")
        first, found = (draw(loop, engine, "auto", tag) for tag in ("first", "found"))
    assert any(sum(one.accepted) for one in by_head)
    assert p_value_of(sampling_target, by_head) > ALPHA
    assert p_value_of(sampling_target, [*first, *found]) > ALPHA
    steps = [step for one in found for step in zip(one.matches, one.accepted, strict=True)]
    looked_up = [accepted for match, accepted in steps if match > 0]
    assert len(looked_up) > len(steps) / 4
    assert any(looked_up) and not all(looked_up)


def test_without_the_kernel_fix_sampling_is_caught(loop: Loop, sampling_target: Path, tmp_path: Path) -> None:
    draft = make_draft(sampling_target, tmp_path, seed=0)
    try:
        with running(loop, sampling_target, draft, worker="UnfixedWorker", max_num_seqs=NUM_DRAWS) as engine:
            answers = draw(loop, engine, "head", "unfixed")
    except Exception as error:  # logits of uninitialised memory may also kill the engine
        if "Engine" not in type(error).__name__:
            raise
    else:
        assert p_value_of(sampling_target, answers) < ALPHA


async def test_an_engine_that_ends_while_it_is_asked_fails_no_request_as_if_that_were_at_fault(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.llm.engine_core

    async def end_and_fail(request: object) -> None:
        monkeypatch.setattr(core.resources, "engine_dead", True)
        raise OSError("the socket is closed")

    monkeypatch.setattr(core, "add_request_async", end_and_fail)
    with pytest.raises(EngineEnded):
        await engine.generate(prompts(1)[0], GREEDY, "ended")
    monkeypatch.undo()
    assert (await engine.generate(prompts(1)[0], GREEDY, "again")).token_ids


async def test_a_token_that_is_to_end_an_answer_does_and_stands_at_its_end(engine: VllmEngine) -> None:
    wanted = (await engine.generate(prompts(1)[0], GREEDY, "to its end")).token_ids
    end = next(token for number, token in enumerate(wanted) if number >= 4 and token not in wanted[:number])
    ended = GREEDY.model_copy(update={"stop_ids": (end,)})
    got = await engine.generate(prompts(1)[0], ended, "ended by a token")
    assert (got.token_ids, got.finish_reason) == (wanted[: wanted.index(end) + 1], "stop")


def test_the_worker_shares_the_schedulers_process(engine: VllmEngine) -> None:
    client: Any = engine.llm.engine_core
    (process,) = client.resources.engine_manager.processes
    assert psutil.Process(process.pid).children() == []  # where vLLM's workers are


async def test_what_goes_first_need_not_wait_for_a_place_in_a_full_engine(engine: VllmEngine) -> None:
    num_places, ended = 64, list[str]()

    async def ask(name: str, sampling: Sampling) -> None:
        await engine.generate(prompts(1)[0], sampling, name)
        ended.append(name)

    traffic = [asyncio.create_task(ask(f"traffic-{n}", GREEDY)) for n in range(2 * num_places)]
    await asyncio.sleep(0.05)
    late = [ask("last", GREEDY.model_copy(update={"priority": 1, "max_tokens": 1}))]
    late += [ask("first", GREEDY.model_copy(update={"priority": -1}))]
    await asyncio.gather(*late, *traffic)
    assert ended.index("first") <= num_places
    assert ended.index("last") > num_places


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (object(), "vLLM runs builtins.object; drafts are swapped and switched off in its V1 model runner only"),
        (
            object.__new__(CPUModelRunner),
            "CPUModelRunner has no num_spec_tokens; another release is installed than wanted",
        ),
    ],
    ids=["V2", "changed"],
)
def test_a_runner_of_another_layout_is_refused_at_the_start(runner: object, reason: str) -> None:
    worker = object.__new__(DraftWorker)
    worker.model_runner, worker.get_draft_model = runner, lambda: torch.nn.Linear(1, 1)
    assert reason in worker.runner()["refused"]


async def test_another_runner_that_was_asked_for_is_refused(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER is 1, wanted 0 or nothing"):
        await VllmEngine.start(tiny_target, None, Params())


# Beside many others, a stream's event carries several tokens; what it carries is the same.
NUM_TOKENS, NUM_STREAMS = 24, 18


async def stream(engine: VllmEngine, number: int, **asked: Any) -> list[list[int]]:
    """Return the tokens of each event of an answer without a draft."""
    wanted = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **asked
    )
    prompt = {"prompt_token_ids": prompts(NUM_STREAMS)[number]}
    return [
        list(output.outputs[0].token_ids) async for output in engine.llm.generate(prompt, wanted, f"events-{number}")
    ]


@pytest.fixture
def plain(engine: VllmEngine, loop: Loop) -> Any:
    """The session's engine without its draft, so that a step gives one token."""
    loop.run_until_complete(engine.set_speculation(False))
    yield engine
    engine.llm.merge_streams = 0
    loop.run_until_complete(engine.set_speculation(True))


async def test_the_more_streams_run_the_more_tokens_an_event_waits_for_up_to_four(plain: VllmEngine) -> None:
    plain.llm.merge_streams = 4
    ended: dict[str, tuple[int, ...]] = {}
    plain.llm.on_finish = lambda completion, _: ended.update({completion.request_id: completion.token_ids})
    crowded = await asyncio.gather(*(stream(plain, number) for number in range(NUM_STREAMS)))
    plain.llm.on_finish = None
    for number, events in enumerate(crowded):
        assert [token for event in events for token in event] == list(ended[f"events-{number}"])
        merged = min(1 + number // 4, MOST_MERGED)
        assert all(len(event) >= merged for event in events[1:-1])
    assert min(len(event) for event in crowded[0][1:-1]) == 1  # who reads late gets more at a time
    assert min(len(events[0]) for events in crowded[4:]) == 1  # nobody waits longer for a first token
    assert all(len(events) < sum(map(len, events)) / 2 for events in crowded[-4:])


async def test_a_client_that_asks_for_larger_events_gets_them_with_few_streams_too(plain: VllmEngine) -> None:
    plain.llm.merge_streams = 4
    events = await stream(plain, 0, stream_interval=6)
    assert all(len(event) >= 6 for event in events[1:-1])
    assert await stream(plain, 1) != events
