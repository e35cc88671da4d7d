"""Drafting by plan inside of vLLM: look-up joined to the head, K by step, and an output that stays the target's."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from operator import eq
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from models.core.evaluation.acceptance import UNDRAFTED, mean_accepted_length
from models.engines import Completion, LookUp, Sampling, Way
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import OPTIONS, DraftOptions
from models.engines.vllm.measuring import measure
from models.lengths import fixed
from tests.models.engines.answers import (
    answer_all,
    golden_of,
    last_of,
    require_none_different,
    require_the_targets,
    written,
)
from tests.models.engines.started import Loop, running

pytestmark = pytest.mark.engine

NUM_TOKENS = 48
THRESHOLD = 0.05
LOOKED_UP = 6
SHORT = 160  # positions of the draft's context; the target's has 256
GREEDY = Sampling(max_tokens=24, ignore_eos=True)
LAYERS, HIDDEN = (1, 2), 128  # of the tiny target, which the head reads


@pytest.fixture(scope="module")
def planned(
    tiny_target: Path, tiny_draft: Path, loop: Loop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """An engine that looks up whatever it can, two passes of the head else; its draft has a shorter context."""
    draft = shutil.copytree(tiny_draft, tmp_path_factory.mktemp("short") / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SHORT}))
    lookup = LookUp(num_tokens=LOOKED_UP, shortest=2)
    with running(loop, tiny_target, draft, num_draft_tokens=2, lengths=fixed.Params(), lookup=lookup) as engine:
        yield engine


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of which each says its sixteen tokens three times."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 67, size=16).tolist() * 3 for _ in range(count)]


async def answer(engine: VllmEngine, way: Way, tag: str, concurrency: int) -> list[Completion]:
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2, drafting=way)
    return await answer_all(engine, prompts(12), sampling, concurrency, f"{tag}-{way}")


async def test_looked_up_and_drafted_rows_of_one_batch_leave_the_output_the_targets(planned: VllmEngine) -> None:
    auto, off = await answer(planned, "auto", "rows", 8), await answer(planned, "off", "rows", 1)
    require_none_different(golden_of(off), auto, THRESHOLD)
    assert all(set(one.drafted) == {0} and set(one.matches) == {UNDRAFTED} for one in off)
    steps = [step for one in auto for step in zip(one.matches, one.drafted, one.accepted, strict=True)]
    looked_up = [(drafted, accepted) for match, drafted, accepted in steps if match > 0]
    assert max(drafted for drafted, _ in looked_up) == LOOKED_UP
    assert sum(accepted for _, accepted in looked_up) > 0
    assert max(drafted for match, drafted, _ in steps if not match) == 2


async def test_requests_of_every_way_share_a_batch(planned: VllmEngine) -> None:
    ways: list[Way] = ["auto", "head", "off"]
    samplings = [Sampling(max_tokens=32, ignore_eos=True, drafting=way) for way in ways] * 4
    asked = enumerate(zip(prompts(12), samplings, strict=True))
    answers = await asyncio.gather(*(planned.generate(*one, f"mixed-{number}") for number, one in asked))
    auto, head, off = (answers[place::3] for place in range(3))
    assert any(max(one.matches) > 0 for one in auto)
    assert all(max(one.drafted) == 2 and not any(one.matches) and one.drafting == "head" for one in head)
    assert all(set(one.drafted) == {0} for one in off)


async def test_a_draft_of_short_context_drafts_for_those_that_fit_and_what_it_can_not_draft_lowers_no_length(
    planned: VllmEngine,
) -> None:
    sampling = Sampling(max_tokens=64, ignore_eos=True, drafting="head")
    short, long = prompts(2, seed=3)
    alone = await planned.generate(short, sampling, "alone")
    asked = [(short, "short"), ((3 * long)[: SHORT - 16], "long"), (4 * short, "longer")]
    one, leaves, beyond = await asyncio.gather(*(planned.generate(ids, sampling, name) for ids, name in asked))
    assert set(one.drafted[:-1]) == {2}
    assert mean_accepted_length([one.trace("")]) == pytest.approx(mean_accepted_length([alone.trace("")]), abs=0.1)
    assert UNDRAFTED not in one.matches and set(beyond.matches) == {UNDRAFTED}
    assert leaves.matches[0] == 0 and set(leaves.matches[-20:]) == {UNDRAFTED}
    assert set(leaves.trace("").drafted) == {2} and leaves.drafted.count(0) == leaves.matches.count(UNDRAFTED)


async def test_an_answer_that_a_grammar_constrains_is_told_apart_and_planned_as_a_kind_of_its_own(
    planned: VllmEngine,
) -> None:
    form = StructuredOutputsParams(regex="[a-f]{30,40}")
    wanted = SamplingParams(max_tokens=24, temperature=0, structured_outputs=form)
    options = DraftOptions("head", "chat", promised=2.0)
    one = (await last_of(planned, prompts(1)[0], wanted, "formed", options)).completion
    assert wanted.extra_args is not None
    assert (one.structured, wanted.extra_args[OPTIONS].domain) == (True, "chat/structured")
    assert len(one.token_ids) == 24
    assert UNDRAFTED not in one.matches  # of what was drafted the grammar may allow nothing


async def test_a_client_that_goes_away_is_told_of_with_the_steps_of_what_it_was_sent(planned: VllmEngine) -> None:
    told: list[Completion] = []
    wanted = SamplingParams(max_tokens=48, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    answers = planned.llm.generate({"prompt_token_ids": prompts(1)[0]}, wanted, "leaves", DraftOptions("head"))
    planned.llm.on_finish, num = lambda completion, _: told.append(completion), 0
    try:
        async for output in answers:
            num += len(output.outputs[0].token_ids)
            if num >= 12:
                break
        await answers.aclose()
    finally:
        planned.llm.on_finish = None
    (one,) = told
    assert one.finish_reason is None and len(one.token_ids) >= 12
    num_emitted = sum(one.accepted) + len(one.drafted)  # the last step's may not all have been sent
    assert num_emitted <= len(one.token_ids) <= 1 + num_emitted


async def test_a_seed_draws_the_same_beside_others_and_with_drafts(
    planned: VllmEngine,
) -> None:
    async def run(way: Way, beside: bool) -> list[tuple[int, ...]]:
        told = []
        for number, prompt in enumerate(asked := prompts(8, seed=7)):
            name = f"seeded-{way}-{beside}-{number}"
            others = [planned.generate(asked[at], GREEDY, f"{name}-{at}") for at in range(3 * beside)]
            seeded = Sampling(max_tokens=16, ignore_eos=True, temperature=1.0, seed=number, drafting=way)
            told.append((await asyncio.gather(planned.generate(prompt, seeded, name), *others))[0].token_ids)
        return told

    alone, beside, drafted = await run("off", False), await run("off", True), await run("head", False)
    assert sum(map(eq, alone, beside)) >= 6  # a near tie may fall the other way
    assert sum(map(eq, alone, drafted)) >= 6


async def test_an_answer_is_looked_up_by_the_next_request_of_its_key_and_by_no_others(planned: VllmEngine) -> None:
    prompt = np.random.default_rng(5).integers(3, 67, size=24).tolist()

    async def ask(key: str, tag: str) -> Completion:
        planned.llm.options_of = lambda *_: DraftOptions("auto", "chat", key)
        wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        try:
            return (await last_of(planned, prompt, wanted, tag)).completion
        finally:
            planned.llm.options_of = None

    first, again, other = await ask("alice", "first"), await ask("alice", "again"), await ask("bob", "other")
    assert first.token_ids == again.token_ids == other.token_ids
    assert sum(again.accepted) > sum(other.accepted)
    assert other.matches == first.matches


async def test_captured_states_are_those_that_the_target_computes_for_the_accepted_tokens(
    planned: VllmEngine, tiny_target: Path, tmp_path: Path
) -> None:
    """Whatever drafts, with prompts that the prefix cache has in part, and of no request that does not want it."""
    done: list[Completion] = []
    ways = {"0": "auto", "1": "head", "2": "off"}

    def options_of(name: str, _: SamplingParams) -> DraftOptions:
        number = name.split("-")[1]
        return DraftOptions(ways.get(number, "auto"), "chat", "key", capture="" if number == "3" else name)

    async def one(number: int, prompt: list[int], turn: int) -> None:
        sampled = SamplingParams(max_tokens=24, temperature=number % 2, seed=number, ignore_eos=True)
        await last_of(planned, prompt, sampled, f"capture-{number}-{turn}")

    await planned.capture_states(1 << 24)
    planned.llm.options_of, planned.llm.on_finish = options_of, lambda completion, _: done.append(completion)
    try:
        for turn in range(2):  # the second time the cache has the prompts' whole blocks
            await asyncio.gather(*(one(number, 2 * prompt, turn) for number, prompt in enumerate(prompts(5, seed=9))))
        assert await written(planned, done, tmp_path, 8) == {"written": 8, "gone": 2}
    finally:
        planned.llm.options_of = planned.llm.on_finish = None
    assert any(max(one.matches) > 0 for one in done) and any(sum(one.accepted) for one in done)
    captured = [one for one in done if "-3-" not in one.request_id]
    assert require_the_targets(captured, tiny_target, tmp_path, LAYERS, HIDDEN) == {0, 32}


async def test_what_steps_take_is_measured_before_requests_come_and_speeds_are_told_of_them(
    tiny_target: Path, tiny_draft: Path, loop: Loop, tmp_path: Path
) -> None:
    params = Params(num_draft_tokens=2, max_model_len=128, max_num_seqs=4)
    sampling, plain = (Sampling(max_tokens=64, ignore_eos=True, drafting=way) for way in ("auto", "off"))
    undrafted: list[Completion] = []
    engine = await VllmEngine.start(tiny_target, tiny_draft, params, costs=tmp_path / "costs")
    try:
        await measure(engine)
        assert await engine.forget_answers() == 0  # it is nobody's text, and nobody's drafts
        for number in range(24):  # else too few steps tell
            await engine.generate(prompts(1)[0], sampling, f"drafted-{number}")
            undrafted.append(await engine.generate(prompts(1)[0], plain, f"plain-{number}"))
        answer = await engine.generate(prompts(1)[0], sampling, "after")
    finally:
        await engine.close()
    assert len(answer.token_ids) == 64
    plain_ms = engine.times.plain_ms(engine.mode.eager)
    assert plain_ms is not None
    assert 0 < plain_ms < 1000
    assert engine.llm.throughput is not None
    assert engine.llm.throughput.why != "unmeasured"
    assert engine.llm.throughput.plain_tokens_per_s > 0
    assert engine.setup is not None
    if (kept := engine.setup.known_cost()) is not None:  # not where other work made it vary
        assert {curve.num_sequences: curve.rows for curve in kept.curves} == {
            1: (1, 2, 3, 4, 5, 9),
            2: (1, 2, 3, 4, 5, 9),
            4: (1, 1.25, 2, 9),
        }
    speed = engine.llm.speeds[""]
    assert 0.2 < speed.tokens_per_s / speed.plain_tokens_per_s < 4
    # What is between two steps takes more of the time than such a small target does.
    assert 1000 / speed.plain_tokens_per_s > 0.7 * median(one.per_token_ms for one in undrafted)
    assert speed.low < speed.tokens_per_s / speed.plain_tokens_per_s < speed.high


async def test_a_prompt_that_is_read_in_pieces_lets_other_requests_go_on_between_them(planned: VllmEngine) -> None:
    prompt, piece = prompts(1, seed=9)[0] * 4, 16  # 192 tokens

    async def steps_beside(wanted: Sampling, tag: str) -> tuple[int, Completion]:
        """Return how many tokens the other request got until the prompt was read, and the prompt's answer."""
        counts, read = [0, 0], asyncio.Event()

        async def other() -> None:
            sampling = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            asked = {"prompt_token_ids": prompts(1, seed=8)[0][:8]}
            async for output in planned.llm.generate(asked, sampling, f"other-{tag}", DraftOptions("off")):
                counts[read.is_set()] += len(output.outputs[0].token_ids)  # who reads late gets several at once
                began.set()

        began = asyncio.Event()
        beside = asyncio.create_task(other())
        await began.wait()
        before = counts[0]
        answered = await planned.generate(prompt, wanted, tag, read.set)
        await beside
        return counts[0] - before, answered

    plain = Sampling(max_tokens=8, ignore_eos=True, num_logprobs=2, drafting="off")
    await planned.llm.reset_prefix_cache()
    at_once, whole = await steps_beside(plain, "whole")
    await planned.llm.reset_prefix_cache()
    between, read = await steps_beside(plain.model_copy(update={"piece": piece}), "pieces")
    assert at_once < len(prompt) // piece - 2 <= between
    require_none_different(golden_of([whole]), [read], THRESHOLD)
