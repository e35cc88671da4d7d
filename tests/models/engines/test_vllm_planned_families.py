"""K by step and look-up in drafts of each family that vLLM's one proposer drafts with.

The target has many layers beside its draft, so that passes are cheap, as they are where drafts are served; the engine
begins with a table of costs that says so, and learns its own.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import SamplingParams

from models.core.drafting.draft_families import family_named, family_of
from models.core.throughput.cost import Time
from models.engines import Completion, LookUp, Sampling
from models.engines import torch as reference
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.lengths import goodput
from models.targets import random
from tests.models.drafts.tiny import save_tiny
from tests.models.engines.answers import golden_of, last_of, require_none_different, require_the_targets, written
from tests.models.engines.sampled import NUM_DRAWS, NUM_TOKENS, P_VALUE, p_value
from tests.models.engines.started import Loop, keep_costs, running

pytestmark = pytest.mark.engine

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
def started(request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target, draft, costs = (tmp_path_factory.mktemp(name) for name in ("target", "draft", "costs"))
    random.build(random.Params(num_layers=NUM_LAYERS), target)
    save_tiny(family_named(request.param), target, draft, scale=0.01, served=True)
    keys = {
        "dtype": "float32",  # in bfloat16 near ties of a random model would make drafts differ
        "enforce_eager": True,
        "num_draft_tokens": K,
        "lengths": goodput.Params(explore=0.0, rest_after=0.5),
        "lookup": LookUp(num_tokens=LOOKED_UP, shortest=12, remembered=0),
    }
    keep_costs(costs, target, draft, "float32", TIMES)
    with running(loop, target, draft, costs, captures=True, **keys) as engine:
        yield Running(engine, target, draft)


def prompts(count: int, width: int, times: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 67, size=width).tolist() * times for _ in range(count)]


async def ask(
    engine: VllmEngine, options: DraftOptions, asked: Sequence[list[int]], num_tokens: int, concurrency: int
) -> list[Completion]:
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: list[int]) -> Completion:
        wanted = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=2)
        async with gate:
            engine.llm.num_swaps += 1  # so that the promise counts, and nothing that was seen before
            return (await last_of(engine, prompt, wanted, f"{options.drafting}-{options.domain}-{number}")).completion

    engine.llm.options_of = lambda *_: options
    try:
        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(asked))))
    finally:
        engine.llm.options_of = None


async def test_each_step_drafts_as_many_tokens_as_are_planned_0_included_and_those_of_the_reference_engine(
    started: Running,
) -> None:
    """After steps at 0, in which the draft rests, it drafts as if it had not: what lacks keys is read anew."""
    engine, target, draft = started
    asked, compared = prompts(6, width=40), []
    golden = golden_of(await ask(engine, DraftOptions("off", "plain"), asked, FEW, concurrency=1))
    for domain, promised, least, most in (("none", 1.0, 0, 0), ("some", 2.2, 1, K), ("all", 3.95, K, K)):
        answers = await ask(engine, DraftOptions("auto", domain, "key", promised), asked, FEW, concurrency=1)
        assert engine.llm.throughput is not None
        assert least <= engine.llm.throughput.num_draft_tokens <= most
        planned = [max(one.drafted) for one in answers]
        assert least <= min(planned) <= max(planned) <= most
        assert not any(match > 0 for one in answers for match in one.matches)
        require_none_different(golden, answers, THRESHOLD)
        compared += [(num, one) for num, one in zip(planned, answers, strict=True) if num]
    same = []
    for num in {num for num, _ in compared}:
        params = reference.Params(dtype="float32", num_draft_tokens=num)
        other = await reference.TorchEngine.start(target, draft, params)
        sampling = Sampling(max_tokens=FEW, ignore_eos=True)
        for one in (one for planned_num, one in compared if planned_num == num):
            theirs = await other.generate(one.prompt_ids, sampling, "other")
            if one.drafted_ids == theirs.drafted_ids:
                assert one.accepted == theirs.accepted
                same.append(one)
    assert len(same) >= len(compared) - 2  # but for near ties


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_beside_sequences_at_rest_the_draft_runs_for_a_judged_one_alone_and_proposes_what_it_does_by_itself(
    started: Running, temperature: float
) -> None:
    engine, asked = started.engine, prompts(8, width=40)

    async def answer(number: int, name: str, drafting: str) -> Completion:
        wanted = SamplingParams(max_tokens=24, temperature=temperature, seed=number, ignore_eos=True)
        options = DraftOptions(drafting, f"{drafting} none", "key", promised=1.0)
        return (await last_of(engine, asked[number], wanted, name, options)).completion

    async def answer_all(num: int) -> list[Completion]:
        engine.llm.num_swaps += 1
        ways = ["head", *["auto"] * (num - 1)]
        names = [f"apart-{temperature}-{num}-{number}" for number in range(num)]
        return list(await asyncio.gather(*map(answer, range(num), names, ways)))

    (alone,), (judged, *others) = await answer_all(1), await answer_all(8)
    by_head = [drafted for one in others for match, drafted in zip(one.matches, one.drafted, strict=True) if not match]
    assert not any(by_head)
    assert max(judged.drafted) == K
    if temperature == 0:  # else they are drawn anew
        assert judged.token_ids == alone.token_ids
        assert judged.drafted_ids == alone.drafted_ids


async def test_a_judged_request_reads_anew_what_was_cached_while_the_draft_rested(started: Running) -> None:
    engine, (first, hot) = started.engine, prompts(2, width=80)

    async def answer(prompt: list[int], drafting: str, name: str) -> Any:
        wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        return await last_of(engine, prompt, wanted, f"hot-{name}", DraftOptions(drafting, "none", "key", promised=1.0))

    engine.llm.num_swaps += 1
    await answer(first, "auto", "first")  # the draft rests before it ends
    await answer(hot, "auto", "hot")
    again = await answer(hot, "auto", "again")
    judged = await answer(hot, "head", "judged")
    await engine.llm.reset_prefix_cache()
    empty = await answer(hot, "head", "empty")
    assert again.num_cached_tokens >= 32  # at rest the cache serves as ever
    assert judged.completion.drafted_ids == empty.completion.drafted_ids


async def test_rows_that_are_looked_up_share_a_batch_with_drafted_ones_and_the_output_stays_the_targets(
    started: Running,
) -> None:
    asked = prompts(16, width=16, times=3)
    plain = await ask(started.engine, DraftOptions("off", "plain"), asked, 48, concurrency=8)
    answers = await ask(started.engine, DraftOptions("auto", "both", "key", promised=3.9), asked, 48, concurrency=8)
    require_none_different(golden_of(plain), answers, THRESHOLD)
    steps = [step for one in answers for step in zip(one.matches, one.drafted, one.accepted, strict=True)]
    looked_up = [(drafted, accepted) for match, drafted, accepted in steps if match > 0]
    by_head = [drafted for match, drafted, _ in steps if not match]
    assert max(drafted for drafted, _ in looked_up) == LOOKED_UP
    assert sum(accepted for _, accepted in looked_up) > 0
    assert max(by_head) == K


async def test_sampled_tokens_follow_the_targets_distribution(started: Running) -> None:
    """A right engine fails once in 10,000 runs."""
    engine, target, _ = started
    prompt = prompts(1, width=16)[0]
    settings = Sampling(temperature=0.8, top_k=40, max_tokens=NUM_TOKENS, ignore_eos=True)
    seeded = [settings.model_copy(update={"seed": seed}) for seed in range(NUM_DRAWS)]
    drawn = (engine.generate(prompt, sampling, f"drawn-{sampling.seed}") for sampling in seeded)
    answers = await asyncio.gather(*drawn)
    assert max(drafted for one in answers for drafted in one.drafted) == K
    assert 0 < sum(sum(one.accepted) for one in answers) < sum(sum(one.drafted) for one in answers)
    assert p_value(target, prompt, [one.token_ids for one in answers], settings) > P_VALUE


async def test_captured_states_are_the_targets_and_there_are_none_where_the_draft_reads_the_text_alone(
    started: Running, tmp_path: Path
) -> None:
    engine, target, draft = started
    taps = family_of(draft).load(draft, target).taps
    layers = sorted({*taps, NUM_LAYERS})
    if not taps:
        with pytest.raises(ValueError, match=rf"hands out its layers \[\] to the draft and not its last, {NUM_LAYERS}"):
            await engine.capture_states(1 << 24)
        return
    assert await engine.capture_states(1 << 24) == len(layers) * HIDDEN
    done: list[Completion] = []
    engine.llm.on_finish = lambda completion, _: done.append(completion)
    try:
        for number, prompt in enumerate(prompts(4, width=24)):
            options = DraftOptions("head", f"states{number}", "key", capture=f"head-states{number}-0")
            await ask(engine, options, [prompt], FEW, 1)
    finally:
        engine.llm.on_finish = None
    assert await written(engine, done, tmp_path, len(done)) == {"written": 4}
    assert all(sum(one.drafted) for one in done)
    require_the_targets(done, target, tmp_path, layers, HIDDEN)
    assert await engine.check_draft(draft) < 0.05  # which gets its own layers alone
    assert await engine.swap_draft(draft, "again") > 0
