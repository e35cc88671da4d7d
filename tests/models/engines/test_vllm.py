"""The vLLM engine: same output with and without a draft, honest counts, swaps that are whole, sampling as a law."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from models.core.evaluation.golden import Golden, near_tie_threshold
from models.drafts import eagle3
from models.engines import Completion, LookUp, Sampling
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.redraft_vllm.swapper import Order
from models.engines.vllm.tap import EngineEnded
from models.engines.vllm.worker import DraftWorker
from models.lengths import fixed
from tests.conftest import make_draft
from tests.models.engines.answers import answer_all, golden_of, num_scored_alike, require_none_different

pytestmark = pytest.mark.engine

ALPHA = 1e-4
TEMPERATURE = 0.8
Loop = asyncio.AbstractEventLoop


def prompts(count: int) -> list[list[int]]:
    """One start that the prefix cache holds, and 8 to 16 tokens of its own each."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, 67, size=64).tolist()
    return [start + rng.integers(3, 67, size=8 + number % 9).tolist() for number in range(count)]


@pytest.fixture(scope="module")
def reference(engine: VllmEngine, loop: Loop) -> tuple[list[Golden], float]:
    """Outputs without speculation, and the near-tie threshold from two more batch sizes."""

    async def run() -> tuple[list[Golden], float]:
        await engine.set_speculation(False)
        greedy = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2)
        first = await answer_all(engine, prompts(20), greedy, 1, "reference")
        again = [await answer_all(engine, prompts(20), greedy, n, f"batch{n}") for n in (4, 16)]
        await engine.set_speculation(True)
        return golden_of(first), near_tie_threshold(golden_of(first), again)

    return loop.run_until_complete(run())


def require_equal(reference: tuple[list[Golden], float], outputs: Sequence[Completion]) -> None:
    golden, threshold = reference
    require_none_different(golden, outputs, threshold, least_equal=0.8)


GREEDY = Sampling(max_tokens=32, ignore_eos=True)


def test_the_first_token_is_told_of_once_and_before_the_others(engine: VllmEngine, loop: Loop) -> None:
    told: list[float] = []

    def tell() -> None:
        told.append(time.monotonic())

    completion = loop.run_until_complete(engine.generate(prompts(1)[0], GREEDY, "told", tell))
    ended_s = time.monotonic()
    assert len(told) == 1
    assert ended_s - told[0] > completion.per_token_ms / 1000


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_output_with_a_draft_is_the_targets_own(
    engine: VllmEngine, loop: Loop, reference: tuple[list[Golden], float], concurrency: int
) -> None:
    outputs = loop.run_until_complete(answer_all(engine, prompts(20), GREEDY, concurrency, f"on{concurrency}"))
    require_equal(reference, outputs)
    assert all(max(o.drafted) == 3 for o in outputs)


def test_every_step_is_counted_and_its_tokens_add_up(
    engine: VllmEngine, loop: Loop, reference: tuple[list[Golden], float]
) -> None:
    for output in loop.run_until_complete(answer_all(engine, prompts(20), GREEDY, 4, "steps")):
        position = 1
        for drafted, accepted in zip(output.drafted_ids, output.accepted, strict=True):
            assert tuple(output.token_ids[position : position + accepted]) == drafted[:accepted]
            position += accepted + 1
        # The last step may have been cut by the token limit; before it every step emits one token more than it accepts.
        assert position - 1 <= len(output.token_ids) <= position
        trace = output.trace("tiny")
        assert trace.accepted == output.accepted


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


async def test_speculation_off_drafts_nothing_and_on_again_drafts(
    engine: VllmEngine, reference: tuple[list[Golden], float]
) -> None:
    await engine.set_speculation(False)
    off = await answer_all(engine, prompts(20), GREEDY, 4, "off")
    await engine.set_speculation(True)
    on = await answer_all(engine, prompts(20), GREEDY, 4, "on-again")
    require_equal(reference, off)
    require_equal(reference, on)
    assert all(set(o.drafted) == {0} and not o.speculating for o in off)
    assert all(max(o.drafted) == 3 for o in on)


def test_scores_without_an_engine_are_the_engines_counts(
    engine: VllmEngine, loop: Loop, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    outputs = loop.run_until_complete(answer_all(engine, prompts(20), GREEDY, 1, "scores"))
    # Near-ties of the draft may move a count.
    assert num_scored_alike(eagle3.load(tiny_draft, tiny_target), tiny_target, outputs, tmp_path) >= 18


async def test_a_request_that_starts_as_a_swap_ends_is_labelled_with_the_new_draft_also_where_nobody_waits_any_longer(
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


@pytest.mark.parametrize("fault", ["nan", "missing", "extra", "shape", "truncated", "empty"])
def test_a_spoiled_file_is_refused_and_serving_goes_on(
    engine: VllmEngine, loop: Loop, reference: tuple[list[Golden], float], tiny_draft: Path, tmp_path: Path, fault: str
) -> None:
    shutil.copytree(tiny_draft, tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    weights = load_file(file)
    if fault == "nan":
        weights["fc.weight"][0, 0] = float("nan")
    elif fault == "missing":
        del weights["norm.weight"]
    elif fault == "extra":
        weights["surprise"] = torch.zeros(2)
    elif fault == "shape":
        weights["norm.weight"] = weights["norm.weight"][:4].clone()
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:3000])
    elif fault == "empty":
        file.write_bytes(b"")
    else:
        save_file(weights, file)
    version = engine.draft_version
    with pytest.raises(ValueError):
        loop.run_until_complete(engine.swap_draft(tmp_path / "draft", "spoiled"))
    assert engine.draft_version == version
    require_equal(reference, loop.run_until_complete(answer_all(engine, prompts(20), GREEDY, 8, f"after-{fault}")))


async def test_a_draft_that_computes_nan_though_its_weights_are_finite_changes_no_output_and_is_found(
    engine: VllmEngine, reference: tuple[list[Golden], float], tiny_draft: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_draft, tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    weights = load_file(file)
    weights["fc.weight"].fill_(3e38)  # a product of it overflows, and a norm makes NaN of that
    save_file(weights, file)
    sampled = Sampling(temperature=TEMPERATURE, max_tokens=32, seed=1, ignore_eos=True)
    await engine.swap_draft(tmp_path / "draft", "overflows")
    try:
        with pytest.raises(ValueError, match="of the loaded draft is off by"):
            await engine.check_draft(tmp_path / "draft")
        greedy = await answer_all(engine, prompts(20), GREEDY, 8, "overflows")
        drawn = await answer_all(engine, prompts(20), sampled, 8, "overflows-sampled")
    finally:
        await engine.swap_draft(tiny_draft, "1")
    require_equal(reference, greedy)
    assert all(len(output.token_ids) == 32 and output.finish_reason == "length" for output in drawn)


# Sampling: tokens 2 and 3 after a fixed prefix, 10,000 draws, against the target's exact probabilities.

PREFIX = [5, 9, 30, 41, 12, 60]
NUM_DRAWS = 10_000
NUM_TOLD_OF = 500  # three steps each; the target takes about one in forty of what look-up drafts for it
SAMPLING_ENGINE = Params(max_model_len=64, max_num_seqs=256)


def exact_probabilities(target: Path) -> np.ndarray:
    """[V, V] of (token 2, token 3), whatever token 1 was."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    size = model.config.vocab_size

    def next_probs(prefixes: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            parts = [model(part, logits_to_keep=1).logits[:, -1] for part in prefixes.split(4096)]
        return (torch.cat(parts).double() / TEMPERATURE).softmax(-1)

    every = torch.arange(size)
    first = next_probs(torch.tensor([PREFIX]))[0]
    second = next_probs(torch.cat([torch.tensor(PREFIX).repeat(size, 1), every[:, None]], 1))
    joint = torch.zeros(size, size, dtype=torch.float64)
    # First tokens that together are rarer than one draw in a hundred thousand can't move a cell.
    order = first.argsort(descending=True)
    likely = order[: int((first[order].cumsum(0) < 1 - 1e-5).sum()) + 1]
    for token in likely:
        prefixes = torch.cat([torch.tensor([*PREFIX, int(token)]).repeat(size, 1), every[:, None]], 1)
        joint += first[token] * second[token][:, None] * next_probs(prefixes)
    return (joint / joint.sum()).numpy()


@pytest.fixture(scope="module")
def exact(sampling_target: Path) -> np.ndarray:
    return exact_probabilities(sampling_target)


@pytest.fixture(scope="module")
def sampling_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Peaked enough that most of the mass lies in few tokens."""
    from models.targets import random

    directory = tmp_path_factory.mktemp("sampling")
    random.build(random.Params(init_std=0.12, seed=3), directory)
    return directory


async def draw(
    target: Path, draft: Path, params: Params, asked: list[Completion] | None = None
) -> list[tuple[int, int]]:
    """Return the second and third token of many answers to one prompt, and put some that are told of into `asked`."""
    engine = await VllmEngine.start(target, draft, params)
    try:
        sampling = SamplingParams(n=250, temperature=TEMPERATURE, max_tokens=4, ignore_eos=True, detokenize=False)
        pairs = []
        for number in range(NUM_DRAWS // sampling.n):
            answers: dict[int, list[int]] = {}
            async for output in engine.llm.generate({"prompt_token_ids": PREFIX}, sampling, f"draw-{number}"):
                for one in output.outputs:
                    answers[one.index] = list(one.token_ids)
            pairs += [(ids[1], ids[2]) for ids in answers.values()]
        if asked is not None:
            sampled = Sampling(temperature=TEMPERATURE, max_tokens=4, ignore_eos=True, drafting="auto")
            names = [f"asked-{number}" for number in range(NUM_TOLD_OF)]
            asked += await asyncio.gather(*(engine.generate(PREFIX, sampled, name) for name in names))
        return pairs
    finally:
        await engine.close()


def p_value(pairs: Sequence[tuple[int, int]], exact: np.ndarray) -> float:
    """χ² over cells of at least 25 expected draws; the rest is pooled by size into cells of that many."""
    observed = np.zeros_like(exact)
    np.add.at(observed, tuple(np.array(pairs).T), 1)
    expected = exact * len(pairs)
    order = np.argsort(-expected, axis=None)
    e, o = expected.ravel()[order], observed.ravel()[order]
    cells = np.floor(np.maximum(np.arange(len(e)), 0))
    small = np.searchsorted(-e, -25.0)
    cells[small:] = small + np.floor(np.cumsum(e[small:]) / 25.0)
    _, cells = np.unique(cells, return_inverse=True)
    e, o = np.bincount(cells, e), np.bincount(cells, o)
    if e[-1] < 5:
        e, o = np.append(e[:-2], e[-2:].sum()), np.append(o[:-2], o[-2:].sum())
    return float(stats.chisquare(o, e * o.sum() / e.sum()).pvalue)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_tokens_follow_the_targets_distribution(
    loop: Loop, sampling_target: Path, exact: np.ndarray, tmp_path: Path, method: str
) -> None:
    """A right engine fails once in 10,000 runs."""
    draft = make_draft(sampling_target, tmp_path, seed=0)
    params = SAMPLING_ENGINE.model_copy(update={"draft_sample_method": method})
    pairs = loop.run_until_complete(draw(sampling_target, draft, params))
    assert len(pairs) == NUM_DRAWS
    assert p_value(pairs, exact) > ALPHA


def test_sampled_tokens_follow_the_targets_distribution_where_look_up_drafts(
    loop: Loop, sampling_target: Path, exact: np.ndarray, tmp_path: Path
) -> None:
    """Every draw but the first ones finds its last token in an answer before it; the others are the head's."""
    draft = make_draft(sampling_target, tmp_path, seed=0)
    params = SAMPLING_ENGINE.model_copy(
        update={"lengths": fixed.Params(), "lookup": LookUp(num_tokens=4, shortest=1, remembered=100_000)}
    )
    asked: list[Completion] = []
    pairs = loop.run_until_complete(draw(sampling_target, draft, params, asked))
    assert p_value(pairs, exact) > ALPHA
    steps = [step for one in asked for step in zip(one.matches, one.accepted, strict=True)]
    assert sum(match > 0 for match, _ in steps) > len(steps) / 4
    assert any(accepted for match, accepted in steps if match > 0)
    assert any(not accepted for match, accepted in steps if match > 0)


def test_without_the_kernel_fix_sampling_is_caught(
    loop: Loop, sampling_target: Path, exact: np.ndarray, tmp_path: Path
) -> None:
    draft = make_draft(sampling_target, tmp_path, seed=0)
    extra = {**SAMPLING_ENGINE.extra, "worker_cls": "tests.models.engines.unfixed.UnfixedWorker"}
    try:
        pairs = loop.run_until_complete(
            draw(sampling_target, draft, SAMPLING_ENGINE.model_copy(update={"extra": extra}))
        )
    except Exception as error:  # logits of uninitialised memory may also kill the engine
        if "Engine" not in type(error).__name__:
            raise
    else:
        assert p_value(pairs, exact) < ALPHA


def test_an_engine_that_ends_while_it_is_asked_fails_no_request_as_if_that_were_at_fault(
    engine: VllmEngine, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.llm.engine_core

    async def end_and_fail(request: object) -> None:
        monkeypatch.setattr(core.resources, "engine_dead", True)
        raise OSError("the socket is closed")

    monkeypatch.setattr(core, "add_request_async", end_and_fail)
    with pytest.raises(EngineEnded):
        loop.run_until_complete(engine.generate(prompts(1)[0], GREEDY, "ended"))
    monkeypatch.undo()
    assert loop.run_until_complete(engine.generate(prompts(1)[0], GREEDY, "again")).token_ids


def test_a_request_with_a_top_k_alone_does_not_end_the_engine(engine: VllmEngine, loop: Loop) -> None:
    sampling = GREEDY.model_copy(update={"temperature": 1.0, "top_k": 5})
    assert loop.run_until_complete(engine.generate(prompts(1)[0], sampling, "of five")).token_ids


def test_a_token_that_is_to_end_an_answer_does_and_stands_at_its_end(engine: VllmEngine, loop: Loop) -> None:
    wanted = loop.run_until_complete(engine.generate(prompts(1)[0], GREEDY, "to its end")).token_ids
    end = next(token for number, token in enumerate(wanted) if number >= 4 and token not in wanted[:number])
    ended = GREEDY.model_copy(update={"stop_ids": (end,)})
    got = loop.run_until_complete(engine.generate(prompts(1)[0], ended, "ended by a token"))
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


def test_the_runner_is_the_one_that_the_worker_steers(engine: VllmEngine, loop: Loop) -> None:
    runner = loop.run_until_complete(engine._call("runner"))
    assert runner == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"


def test_the_prefix_cache_is_on_as_in_serving(engine: VllmEngine) -> None:
    assert engine.llm.vllm_config.cache_config.enable_prefix_caching


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


def test_another_runner_that_was_asked_for_is_refused(
    tiny_target: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER is 1, wanted 0 or nothing"):
        loop.run_until_complete(VllmEngine.start(tiny_target, None, Params()))
