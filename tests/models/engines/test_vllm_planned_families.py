"""K by step and look-up in drafts of each family that vLLM's one proposer drafts with.

The target has many layers beside its draft, so that passes are cheap, as they are where drafts are served; the engine
begins with a table of costs that says so, and learns its own.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import vllm
from vllm import SamplingParams

from models.core.drafting.draft_families import family_named, family_of
from models.core.evaluation.golden import Golden, equal_output
from models.core.learning.captured import read
from models.core.learning.hidden import HiddenStates, Sample
from models.core.throughput.cost import Cost, Time, save_cost
from models.engines import Completion, LookUp, Sampling
from models.engines import torch as reference
from models.engines.vllm import Params
from models.engines.vllm.capture import Claim
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.engines.vllm.measuring import measured_for
from models.lengths import goodput
from models.targets import random
from tests.models.drafts.tiny import save_tiny
from tests.models.engines.sampled import NUM_DRAWS, NUM_TOKENS, P_VALUE, p_value

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
FAMILIES = ("eagle3", "lm", "parallel_eagle", "dflash")
K, LOOKED_UP = 3, 6
NUM_LAYERS, HIDDEN = 16, 128
THRESHOLD = 0.02
FEW = 8  # tokens of an answer: fewer than a look-up must match, and than the steps after which K may change
TIMES = (
    *(Time(num, num * rows, 0, 15.0 + 0.05 * num * rows) for num in (1, 8) for rows in (1, 4, 9)),
    *(Time(num, num, 1, ms) for num, ms in ((1, 16.5), (8, 17.5))),
)


class Running(NamedTuple):
    """An engine, and what it was started with."""

    engine: VllmEngine
    target: Path
    draft: Path


@pytest.fixture(scope="module", params=FAMILIES)
def running(request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target, draft, costs = (tmp_path_factory.mktemp(name) for name in ("target", "draft", "costs"))
    random.build(random.Params(num_layers=NUM_LAYERS), target)
    save_tiny(family_named(request.param), target, draft, scale=0.01, served=True)
    facts = measured_for(target, draft, "float32", True, vllm.__version__)
    save_cost(Cost.measured(TIMES, facts), costs / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    params = Params(
        dtype="float32",  # in bfloat16 near ties of a random model would make drafts differ
        enforce_eager=True,
        num_draft_tokens=K,
        max_model_len=256,
        max_num_seqs=16,
        lengths=goodput.Params(explore=0.0, rest_after=0.5),
        lookup=LookUp(num_tokens=LOOKED_UP, shortest=12, remembered=0),
        extra={"block_size": 32},
    )
    engine = loop.run_until_complete(VllmEngine.start(target, draft, params, costs=costs, captures=True))
    assert engine.setup is not None
    assert engine.setup.known_cost() is not None
    yield Running(engine, target, draft)
    loop.run_until_complete(engine.close())


def prompts(count: int, width: int, times: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 67, size=width).tolist() * times for _ in range(count)]


def ask(
    loop: Loop,
    engine: VllmEngine,
    draft_options: DraftOptions,
    asked: Sequence[list[int]],
    num_tokens: int,
    concurrency: int,
) -> list[Completion]:
    engine.llm.options_of = lambda *_: draft_options

    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(concurrency)

        async def one(number: int, prompt: list[int]) -> Completion:
            wanted = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=2)
            async with gate:
                engine.llm.num_swaps += 1  # so that the promise counts, and nothing that was seen before
                name = f"{draft_options.drafting}-{draft_options.domain}-{number}"
                async for output in engine.llm.generate({"prompt_token_ids": prompt}, wanted, name):
                    last = output
            completion: Completion = last.completion
            return completion

        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(asked))))

    try:
        return loop.run_until_complete(run())
    finally:
        engine.llm.options_of = None


def differ(answers: Sequence[Completion], plain: Sequence[Completion]) -> int:
    golden = [Golden(prompt_ids=one.prompt_ids, token_ids=one.token_ids, gaps=one.gaps) for one in plain]
    verdicts = Counter(equal_output(g, one.token_ids, THRESHOLD) for g, one in zip(golden, answers, strict=True))
    return verdicts["different"]


def test_each_step_drafts_as_many_tokens_as_are_planned_0_included_and_those_of_the_reference_engine(
    running: Running, loop: Loop
) -> None:
    """After steps at 0, in which the draft rests, it drafts as if it had not: what lacks keys is read anew."""
    engine, target, draft = running
    asked, compared = prompts(6, width=40), []
    plain = ask(loop, engine, DraftOptions("off", "plain"), asked, FEW, concurrency=1)
    for domain, promised, least, most in (("none", 1.0, 0, 0), ("some", 2.2, 1, K), ("all", 3.95, K, K)):
        answers = ask(loop, engine, DraftOptions("auto", domain, "key", promised), asked, FEW, concurrency=1)
        assert engine.llm.throughput is not None
        assert least <= engine.llm.throughput.num_draft_tokens <= most
        planned = [max(one.drafted) for one in answers]
        assert least <= min(planned) <= max(planned) <= most
        assert not any(match > 0 for one in answers for match in one.matches)
        assert differ(answers, plain) == 0
        compared += [(num, one) for num, one in zip(planned, answers, strict=True) if num]
    same = []
    for num in {num for num, _ in compared}:
        params = reference.Params(dtype="float32", num_draft_tokens=num)
        other = loop.run_until_complete(reference.TorchEngine.start(target, draft, params))
        sampling = Sampling(max_tokens=FEW, ignore_eos=True)
        for one in (one for planned_num, one in compared if planned_num == num):
            theirs = loop.run_until_complete(other.generate(one.prompt_ids, sampling, "other"))
            if one.drafted_ids == theirs.drafted_ids:
                assert one.accepted == theirs.accepted
                same.append(one)
    assert len(same) >= len(compared) - 2  # but for near ties


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_beside_sequences_at_rest_the_draft_runs_for_a_judged_one_alone_and_proposes_what_it_does_by_itself(
    running: Running, loop: Loop, temperature: float
) -> None:
    engine, asked = running.engine, prompts(8, width=40)

    async def answer(number: int, name: str, drafting: str) -> Completion:
        wanted = SamplingParams(max_tokens=24, temperature=temperature, seed=number, ignore_eos=True)
        prompt, draft_options = (
            {"prompt_token_ids": asked[number]},
            DraftOptions(drafting, f"{drafting} none", "key", promised=1.0),
        )
        async for output in engine.llm.generate(prompt, wanted, name, draft_options):
            last = output
        completion: Completion = last.completion
        return completion

    async def answer_all(num: int) -> list[Completion]:
        engine.llm.num_swaps += 1
        ways = ["head", *["auto"] * (num - 1)]
        names = [f"apart-{temperature}-{num}-{number}" for number in range(num)]
        return list(await asyncio.gather(*map(answer, range(num), names, ways)))

    (alone,), (judged, *others) = (loop.run_until_complete(answer_all(num)) for num in (1, 8))
    by_head = [drafted for one in others for match, drafted in zip(one.matches, one.drafted, strict=True) if not match]
    assert not any(by_head)
    assert max(judged.drafted) == K
    if temperature == 0:  # else they are drawn anew
        assert judged.token_ids == alone.token_ids
        assert judged.drafted_ids == alone.drafted_ids


def test_a_judged_request_reads_anew_what_was_cached_while_the_draft_rested(running: Running, loop: Loop) -> None:
    engine, (first, hot) = running.engine, prompts(2, width=80)

    async def answer(prompt: list[int], drafting: str, name: str) -> tuple[int, Completion]:
        wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        draft_options = DraftOptions(drafting, "none", "key", promised=1.0)
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, wanted, f"hot-{name}", draft_options):
            last = output
        return last.num_cached_tokens, last.completion

    async def run() -> tuple[int, Completion, Completion]:
        engine.llm.num_swaps += 1
        await answer(first, "auto", "first")  # the draft rests before it ends
        await answer(hot, "auto", "hot")
        again, _ = await answer(hot, "auto", "again")
        _, judged = await answer(hot, "head", "judged")
        await engine.llm.reset_prefix_cache()
        _, empty = await answer(hot, "head", "empty")
        return again, judged, empty

    again, judged, empty = loop.run_until_complete(run())
    assert again >= 32  # at rest the cache serves as ever
    assert judged.drafted_ids == empty.drafted_ids


def test_rows_that_are_looked_up_share_a_batch_with_drafted_ones_and_the_output_stays_the_targets(
    running: Running, loop: Loop
) -> None:
    asked = prompts(16, width=16, times=3)
    plain = ask(loop, running.engine, DraftOptions("off", "plain"), asked, 48, concurrency=8)
    answers = ask(loop, running.engine, DraftOptions("auto", "both", "key", promised=3.9), asked, 48, concurrency=8)
    assert differ(answers, plain) == 0
    steps = [step for one in answers for step in zip(one.matches, one.drafted, one.accepted, strict=True)]
    looked_up = [(drafted, accepted) for match, drafted, accepted in steps if match > 0]
    by_head = [drafted for match, drafted, _ in steps if not match]
    assert max(drafted for drafted, _ in looked_up) == LOOKED_UP
    assert sum(accepted for _, accepted in looked_up) > 0
    assert max(by_head) == K


def test_sampled_tokens_follow_the_targets_distribution(running: Running, loop: Loop) -> None:
    """A right engine fails once in 10,000 runs."""
    engine, target, _ = running
    prompt, settings = (
        prompts(1, width=16)[0],
        Sampling(temperature=0.8, top_k=40, max_tokens=NUM_TOKENS, ignore_eos=True),
    )

    async def draw() -> list[Completion]:
        seeded = [settings.model_copy(update={"seed": seed}) for seed in range(NUM_DRAWS)]
        drawn = (engine.generate(prompt, sampling, f"drawn-{sampling.seed}") for sampling in seeded)
        return list(await asyncio.gather(*drawn))

    answers = loop.run_until_complete(draw())
    assert max(drafted for one in answers for drafted in one.drafted) == K
    assert 0 < sum(sum(one.accepted) for one in answers) < sum(sum(one.drafted) for one in answers)
    assert p_value(target, prompt, [one.token_ids for one in answers], settings) > P_VALUE


def test_captured_states_are_the_targets_and_there_are_none_where_the_draft_reads_the_text_alone(
    running: Running, loop: Loop, tmp_path: Path
) -> None:
    engine, target, draft = running
    taps = family_of(draft).load(draft, target).taps
    layers = sorted({*taps, NUM_LAYERS})
    if not taps:
        with pytest.raises(ValueError, match=rf"hands out its layers \[\] to the draft and not its last, {NUM_LAYERS}"):
            loop.run_until_complete(engine.capture_states(1 << 24))
        return
    assert loop.run_until_complete(engine.capture_states(1 << 24)) == len(layers) * HIDDEN
    done: list[Completion] = []

    async def claim() -> dict[str, int]:
        claims = [Claim(c.request_id, str(tmp_path / c.request_id), len(c.prompt_ids + c.token_ids), "t") for c in done]
        await engine.settle_states(claims)
        while (counts := await engine.settle_states([])).get("written", 0) < len(done):
            await asyncio.sleep(0.01)
        return counts

    engine.llm.on_finish = lambda completion, _: done.append(completion)
    try:
        for number, prompt in enumerate(prompts(4, width=24)):
            ask(
                loop,
                engine,
                DraftOptions("head", f"states{number}", "key", capture=f"head-states{number}-0"),
                [prompt],
                FEW,
                1,
            )
    finally:
        engine.llm.on_finish = None
    assert loop.run_until_complete(claim()) == {"written": 4}
    assert all(sum(one.drafted) for one in done)
    samples = [Sample(one.request_id, "chat", list(one.prompt_ids), list(one.token_ids)) for one in done]
    states = HiddenStates(tmp_path / "hidden", samples, layers, HIDDEN)
    states.extract(target)
    for sample in samples:
        found = read(tmp_path / sample.id, "t", layers, sample.token_ids)
        wanted = states.read(sample)[0][found.first : -1].float()
        assert float((found.states.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.03
