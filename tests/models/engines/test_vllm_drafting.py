"""Drafting by plan inside of vLLM: look-up joined to the head, K by step, and an output that stays the target's."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from models.core.evaluation.acceptance import UNDRAFTED, mean_accepted_length
from models.core.evaluation.golden import Golden, equal_output
from models.core.learning.captured import read
from models.core.learning.hidden import HiddenStates, Sample
from models.engines import Completion, LookUp, Sampling, Way
from models.engines.vllm import Params
from models.engines.vllm.capture import Claim
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import OPTIONS, DraftOptions
from models.engines.vllm.measuring import measure
from models.lengths import fixed

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
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
    params = Params(
        num_draft_tokens=2,
        max_model_len=256,
        max_num_seqs=16,
        lengths=fixed.Params(),
        lookup=LookUp(num_tokens=LOOKED_UP, shortest=2),
        extra={"block_size": 32},
    )
    engine = loop.run_until_complete(VllmEngine.start(tiny_target, draft, params, draft_version="1"))
    yield engine
    loop.run_until_complete(engine.close())


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of which each says its sixteen tokens three times."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 67, size=16).tolist() * 3 for _ in range(count)]


def answer(loop: Loop, engine: VllmEngine, way: Way, tag: str, concurrency: int = 4, seed: int = 1) -> list[Completion]:
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2, drafting=way)

    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(concurrency)

        async def one(number: int, prompt: list[int]) -> Completion:
            async with gate:
                return await engine.generate(prompt, sampling, f"{tag}-{way}-{number}")

        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(12, seed)))))

    return loop.run_until_complete(run())


@pytest.mark.parametrize("concurrency", [1, 8])
def test_looked_up_and_drafted_rows_of_one_batch_leave_the_output_the_targets(
    planned: VllmEngine, loop: Loop, concurrency: int
) -> None:
    auto = answer(loop, planned, "auto", f"auto{concurrency}", concurrency, seed=concurrency)
    off = answer(loop, planned, "off", f"plain{concurrency}", 1, seed=concurrency)
    golden = [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in off]
    verdicts = Counter(equal_output(g, one.token_ids, THRESHOLD) for g, one in zip(golden, auto, strict=True))
    assert verdicts["different"] == 0, verdicts
    assert all(set(one.drafted) == {0} and set(one.matches) == {UNDRAFTED} for one in off)
    looked_up = [
        step for one in auto for step in zip(one.matches, one.drafted, one.accepted, strict=True) if step[0] > 0
    ]
    by_head = [drafted for one in auto for match, drafted in zip(one.matches, one.drafted, strict=True) if not match]
    assert looked_up
    assert max(drafted for _, drafted, _ in looked_up) == LOOKED_UP
    assert sum(accepted for *_, accepted in looked_up) > 0
    assert by_head
    assert max(by_head) == 2


def test_a_request_that_is_drafted_by_the_head_alone_looks_nothing_up(planned: VllmEngine, loop: Loop) -> None:
    for one in answer(loop, planned, "head", "alone"):
        assert set(one.matches) == {0}
        assert max(one.drafted) == 2
        assert one.drafting == "head"


def test_requests_of_every_way_share_a_batch(planned: VllmEngine, loop: Loop) -> None:
    async def run() -> list[Completion]:
        ways: list[Way] = ["auto", "head", "off"] * 4
        return list(
            await asyncio.gather(
                *(
                    planned.generate(prompt, Sampling(max_tokens=32, ignore_eos=True, drafting=way), f"mixed-{number}")
                    for number, (prompt, way) in enumerate(zip(prompts(12), ways, strict=True))
                )
            )
        )

    auto, head, off = (loop.run_until_complete(run())[place::3] for place in range(3))
    assert any(max(one.matches) > 0 for one in auto)
    assert all(max(one.drafted) == 2 and not any(one.matches) for one in head)
    assert all(set(one.drafted) == {0} for one in off)


def test_a_draft_of_short_context_drafts_for_those_that_fit_and_what_it_can_not_draft_lowers_no_length(
    planned: VllmEngine, loop: Loop
) -> None:
    sampling = Sampling(max_tokens=64, ignore_eos=True, drafting="head")
    short, long = prompts(2, seed=3)

    async def run() -> list[Completion]:
        asked = [(short, "short"), ((3 * long)[: SHORT - 16], "long"), (4 * short, "longer")]
        return list(await asyncio.gather(*(planned.generate(ids, sampling, name) for ids, name in asked)))

    alone = loop.run_until_complete(planned.generate(short, sampling, "alone"))
    one, leaves, beyond = loop.run_until_complete(run())
    assert set(one.drafted[:-1]) == {2}
    assert mean_accepted_length([one.trace("")]) == pytest.approx(mean_accepted_length([alone.trace("")]), abs=0.1)
    assert UNDRAFTED not in one.matches and set(beyond.matches) == {UNDRAFTED}
    assert leaves.matches[0] == 0 and set(leaves.matches[-20:]) == {UNDRAFTED}
    assert set(leaves.trace("").drafted) == {2} and leaves.drafted.count(0) == leaves.matches.count(UNDRAFTED)


@pytest.mark.parametrize(
    ("kind", "merged", "way"),
    [
        (RequestOutputKind.FINAL_ONLY, 1, "head"),
        (RequestOutputKind.CUMULATIVE, 1, "auto"),
        (RequestOutputKind.DELTA, 1, "auto"),
        (RequestOutputKind.DELTA, 3, "head"),
    ],
)
def test_an_answer_that_ends_at_a_stop_string_tells_the_steps_of_the_whole_one_up_to_there(
    planned: VllmEngine, loop: Loop, kind: RequestOutputKind, merged: int, way: Way
) -> None:
    prompt, told = prompts(1, seed=5)[0], f"{kind}-{merged}"

    def ask(tag: str, **further: Any) -> tuple[str, Completion]:
        async def run() -> tuple[str, Completion]:
            wanted = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, output_kind=kind, **further)
            wanted.stream_interval, text = merged, ""
            async for output in planned.llm.generate({"prompt_token_ids": prompt}, wanted, tag, DraftOptions(way)):
                assert output.kv_transfer_params is None  # it would go out to the client
                text = (text if kind == RequestOutputKind.DELTA else "") + output.outputs[0].text
                last: Any = output
            return text, last.completion

        return loop.run_until_complete(run())

    text, whole = ask(f"whole-{told}")
    for end in range(8, 20, 2):
        _, stopped = ask(f"stop-{told}-{end}", stop=[text[:end]])
        num = len(stopped.token_ids)
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[:num])
        position, steps = 1, []
        for ids, accepted in zip(whole.drafted_ids, whole.accepted, strict=True):
            if position < num:
                steps.append((ids, min(accepted, num - position)))
            position += accepted + 1
        assert [*zip(stopped.drafted_ids, stopped.accepted, strict=True)] == steps


def test_an_answer_that_a_grammar_constrains_is_told_apart_and_planned_as_a_kind_of_its_own(
    planned: VllmEngine, loop: Loop
) -> None:
    form = StructuredOutputsParams(regex="[a-f]{30,40}")

    async def run() -> tuple[Completion, str]:
        wanted = SamplingParams(max_tokens=24, temperature=0, structured_outputs=form)
        asked = {"prompt_token_ids": prompts(1)[0]}
        async for output in planned.llm.generate(asked, wanted, "formed", DraftOptions("head", "chat", promised=2.0)):
            last: Any = output
        assert wanted.extra_args is not None
        return last.completion, wanted.extra_args[OPTIONS].domain

    one, domain = loop.run_until_complete(run())
    assert (one.structured, domain) == (True, "chat/structured")
    assert len(one.token_ids) == 24
    assert UNDRAFTED not in one.matches  # of what was drafted the grammar may allow nothing


def test_a_client_that_goes_away_is_told_of_with_the_steps_of_what_it_was_sent(planned: VllmEngine, loop: Loop) -> None:
    told: list[Completion] = []

    async def run() -> None:
        wanted = SamplingParams(max_tokens=48, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        answers = planned.llm.generate({"prompt_token_ids": prompts(1)[0]}, wanted, "leaves", DraftOptions("head"))
        num = 0
        async for output in answers:
            num += len(output.outputs[0].token_ids)
            if num >= 12:
                break
        await answers.aclose()

    planned.llm.on_finish = lambda completion, _: told.append(completion)
    try:
        loop.run_until_complete(run())
    finally:
        planned.llm.on_finish = None
    (one,) = told
    assert one.finish_reason is None and len(one.token_ids) >= 12
    num_emitted = sum(one.accepted) + len(one.drafted)  # the last step's may not all have been sent
    assert num_emitted <= len(one.token_ids) <= 1 + num_emitted


def test_without_drafts_a_seed_draws_the_same_beside_others_and_with_them_it_does_not(
    planned: VllmEngine, loop: Loop
) -> None:
    def seeded(number: int, way: Way) -> Sampling:
        return Sampling(max_tokens=16, ignore_eos=True, temperature=1.0, seed=number, drafting=way)

    async def run(way: Way, beside: bool) -> list[tuple[int, ...]]:
        told = []
        for number, prompt in enumerate(asked := prompts(8, seed=7)):
            name = f"seeded-{way}-{beside}-{number}"
            others = [planned.generate(asked[at], GREEDY, f"{name}-{at}") for at in range(3 * beside)]
            one = planned.generate(prompt, seeded(number, way), name)
            told.append((await asyncio.gather(one, *others))[0].token_ids)
        return told

    alone, beside = (loop.run_until_complete(run("off", beside)) for beside in (False, True))
    drafted = loop.run_until_complete(run("head", beside=False))
    assert sum(map(eq, alone, beside)) >= 6  # a near tie may fall the other way
    assert sum(map(eq, alone, drafted)) <= 4


def test_an_answer_is_looked_up_by_the_next_request_of_its_key_and_by_no_others(
    planned: VllmEngine, loop: Loop
) -> None:
    prompt = np.random.default_rng(5).integers(3, 67, size=24).tolist()

    def ask(key: str, tag: str) -> Completion:
        planned.llm.options_of = lambda *_: DraftOptions("auto", "chat", key)

        async def run() -> Completion:
            from vllm import SamplingParams

            wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            async for output in planned.llm.generate({"prompt_token_ids": prompt}, wanted, tag):
                last = output
            completion: Completion = last.completion
            return completion

        try:
            return loop.run_until_complete(run())
        finally:
            planned.llm.options_of = None

    first, again, other = ask("alice", "first"), ask("alice", "again"), ask("bob", "other")
    assert first.token_ids == again.token_ids == other.token_ids
    assert sum(again.accepted) > sum(other.accepted)
    assert other.matches == first.matches


def test_captured_states_are_those_that_the_target_computes_for_the_accepted_tokens(
    planned: VllmEngine, tiny_target: Path, loop: Loop, tmp_path: Path
) -> None:
    """Whatever drafts, with prompts that the prefix cache has in part, and of no request that does not want it."""
    from vllm import SamplingParams

    done: list[Completion] = []
    ways = {"0": "auto", "1": "head", "2": "off"}

    def options_of(name: str, _: SamplingParams) -> DraftOptions:
        number = name.split("-")[1]
        return DraftOptions(ways.get(number, "auto"), "chat", "key", capture="" if number == "3" else name)

    async def run() -> dict[str, int]:
        await planned.capture_states(1 << 24)
        before = await planned.settle_states([])
        planned.llm.options_of, planned.llm.on_finish = options_of, lambda completion, _: done.append(completion)
        for turn in range(2):  # the second time the cache has the prompts' whole blocks
            await asyncio.gather(*(one(number, 2 * prompt, turn) for number, prompt in enumerate(prompts(5, seed=9))))
        claims = [Claim(c.request_id, str(tmp_path / c.request_id), len(c.prompt_ids + c.token_ids), "t") for c in done]
        await planned.settle_states(claims)
        while (counts := await planned.settle_states([])).get("written", 0) - before.get("written", 0) < 8:
            await asyncio.sleep(0.01)
        return counts

    async def one(number: int, prompt: list[int], turn: int) -> None:
        sampled = SamplingParams(max_tokens=24, temperature=number % 2, seed=number, ignore_eos=True)
        async for _ in planned.llm.generate({"prompt_token_ids": prompt}, sampled, f"capture-{number}-{turn}"):
            pass

    try:
        counts = loop.run_until_complete(run())
    finally:
        planned.llm.options_of = planned.llm.on_finish = None
    assert counts == {"written": 8, "gone": 2}
    samples = [
        Sample(one.request_id, "chat", list(one.prompt_ids), list(one.token_ids))
        for one in done
        if "-3-" not in one.request_id
    ]
    assert any(max(one.matches) > 0 for one in done) and any(sum(one.accepted) for one in done)
    states = HiddenStates(tmp_path / "hidden", samples, LAYERS, HIDDEN)
    states.extract(tiny_target)
    firsts = set()
    for sample in samples:
        found = read(tmp_path / sample.id, "t", LAYERS, sample.token_ids)
        firsts.add(found.first)
        wanted = states.read(sample)[0][found.first : -1].float()
        assert float((found.states.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.03
    assert firsts == {0, 32}


def test_what_steps_take_is_measured_before_requests_come_and_speeds_are_told_of_them(
    tiny_target: Path, tiny_draft: Path, loop: Loop, tmp_path: Path
) -> None:
    params = Params(num_draft_tokens=2, max_model_len=128, max_num_seqs=4)

    undrafted: list[Completion] = []

    async def start_and_measure() -> tuple[VllmEngine, Completion]:
        engine = await VllmEngine.start(tiny_target, tiny_draft, params, costs=tmp_path / "costs")
        try:
            await measure(engine)
            assert await engine.forget_answers() == 0  # it is nobody's text, and nobody's drafts
            sampling = Sampling(max_tokens=64, ignore_eos=True, drafting="auto")
            plain = Sampling(max_tokens=64, ignore_eos=True, drafting="off")
            for number in range(24):  # else too few steps tell
                await engine.generate(prompts(1)[0], sampling, f"drafted-{number}")
                undrafted.append(await engine.generate(prompts(1)[0], plain, f"plain-{number}"))
            return engine, await engine.generate(prompts(1)[0], sampling, "after")
        finally:
            await engine.close()

    engine, answer = loop.run_until_complete(start_and_measure())
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


def test_a_prompt_that_is_read_in_pieces_lets_other_requests_go_on_between_them(
    planned: VllmEngine, loop: Loop
) -> None:
    prompt, piece = prompts(1, seed=9)[0] * 4, 16  # 192 tokens

    async def steps_beside(wanted: Sampling, tag: str) -> tuple[int, Completion]:
        """Return how often the other request was answered until the prompt was read, and the prompt's answer."""
        counts, read = [0, 0], asyncio.Event()

        async def other() -> None:
            sampling = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            asked = {"prompt_token_ids": prompts(1, seed=8)[0][:8]}
            async for _ in planned.llm.generate(asked, sampling, f"other-{tag}", DraftOptions("off")):
                counts[read.is_set()] += 1
                began.set()

        began = asyncio.Event()
        beside = asyncio.create_task(other())
        await began.wait()
        before = counts[0]
        answered = await planned.generate(prompt, wanted, tag, read.set)
        await beside
        return counts[0] - before, answered

    async def run() -> list[tuple[int, Completion]]:
        plain = Sampling(max_tokens=8, ignore_eos=True, num_logprobs=2, drafting="off")
        await planned.llm.reset_prefix_cache()
        whole = await steps_beside(plain, "whole")
        await planned.llm.reset_prefix_cache()
        return [whole, await steps_beside(plain.model_copy(update={"piece": piece}), "pieces")]

    (at_once, whole), (between, read) = loop.run_until_complete(run())
    assert at_once < len(prompt) // piece - 2 <= between
    golden = Golden(prompt_ids=whole.prompt_ids, token_ids=whole.token_ids, gaps=whole.gaps)
    assert equal_output(golden, read.token_ids, THRESHOLD) != "different"
