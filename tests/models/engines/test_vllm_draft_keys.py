"""What is in the prefix cache when a draft comes, goes or was away: its answers are drafted as from an empty one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from models.drafts import eagle3
from models.engines import Completion, Sampling
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DRAFTED, GAPS, OPTIONS, DraftOptions
from models.engines.vllm.scheduler import DraftKeys, TracingScheduler
from models.targets import random
from tests.models.drafts.tiny import save_tiny
from tests.models.engines.answers import last_of
from tests.models.engines.started import BLOCK, Loop, running

pytestmark = pytest.mark.engine

ALONE = DraftOptions("head")  # what is looked up needs no keys

CONTEXT = 384
NUM_PROMPTS = 12
GREEDY = Sampling(max_tokens=24, ignore_eos=True)
Running = tuple[VllmEngine, list[Path]]
SMALL = 4  # of the blocks without an engine
PROMPT, OTHER = list(range(100, 110)), list(range(200, 210))  # two of those and a half


class Cache:
    """The cache of a scheduler, and requests that grow in it."""

    def __init__(self, num_blocks: int = 64) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=SMALL, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(config, max_model_len=256, scheduler_block_size=SMALL, hash_block_size=SMALL)
        self.keys = DraftKeys(self.manager)
        self.hasher = get_request_block_hasher(SMALL, sha256)
        self.num_requests = 0

    def request(self, token_ids: list[int]) -> Request:
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=100)
        sampling.update_from_generation_config({}, None)
        return Request(str(self.num_requests), token_ids, sampling, None, block_hasher=self.hasher)

    def hits(self, token_ids: list[int]) -> int:
        """How many tokens of a prompt a new request would find."""
        return self.manager.get_computed_blocks(self.request(token_ids))[1]

    def step(self, request: Request, drafted: bool, then: tuple[int, ...] = (1,)) -> None:
        """Compute all that the request has, and add the tokens of `then`."""
        blocks, found = None, 0
        if request.num_computed_tokens == 0:
            blocks, found, _ = self.manager.get_computed_blocks(request)
        count = request.num_tokens - request.num_computed_tokens - found
        assert self.manager.allocate_slots(request, count, found, blocks, num_lookahead_tokens=3) is not None
        request.num_computed_tokens += found + count
        end = request.num_computed_tokens
        self.keys.note({request.request_id: (end - count, end)})
        self.keys.settle(lambda _: drafted)
        request.append_output_token_ids(list(then))

    def drafted_step(self) -> None:
        """A step of another request, with the draft."""
        other = self.request([7, 7, 7])
        self.step(other, drafted=True)
        self.manager.free(other)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_blocks_written_with_the_draft_are_found_again(cache: Cache) -> None:
    one = cache.request(PROMPT)
    cache.step(one, drafted=True)
    cache.manager.free(one)
    assert cache.hits(PROMPT) == 2 * SMALL


def test_blocks_written_without_it_are_found_until_drafting_goes_on(cache: Cache) -> None:
    one = cache.request(PROMPT)
    cache.step(one, drafted=False)
    cache.manager.free(one)
    assert cache.hits(PROMPT) == 2 * SMALL
    cache.drafted_step()
    assert cache.hits(PROMPT) == 0


def test_a_prompt_with_keys_stays_when_others_are_read_without_the_draft(cache: Cache) -> None:
    hot = cache.request(PROMPT)
    cache.step(hot, drafted=True)
    again = cache.request([*PROMPT, 1, 2, 3, 4])
    cache.step(again, drafted=False)  # finds two blocks, writes the third
    cache.drafted_step()
    assert cache.hits([*PROMPT, 1, 2, 3, 4]) == 2 * SMALL


def test_of_a_step_whose_draft_ran_for_some_the_others_blocks_lack_keys_and_stay_while_it_rests(cache: Cache) -> None:
    one, other, tokens = cache.request(PROMPT), cache.request(OTHER), len(PROMPT)
    for request in (one, other):
        assert cache.manager.allocate_slots(request, tokens, 0, None) is not None
        request.num_computed_tokens = tokens
    cache.keys.note({request.request_id: (0, tokens) for request in (one, other)})
    cache.keys.settle(lambda name: name == one.request_id, goes_on=False)
    assert (cache.hits(PROMPT), cache.hits(OTHER)) == (2 * SMALL, 2 * SMALL)
    cache.keys.forget_lacking()
    assert (cache.hits(PROMPT), cache.hits(OTHER)) == (2 * SMALL, 0)


@pytest.mark.parametrize("drafted", [(False, True, True), (True, False, True)])
def test_a_block_that_was_written_in_part_without_the_draft_is_forgotten_once_it_is_full(
    cache: Cache, drafted: tuple[bool, ...]
) -> None:
    one = cache.request(PROMPT[:5])
    cache.step(one, drafted=drafted[0], then=(1,))  # positions 0 to 4
    cache.step(one, drafted=drafted[1], then=(2,))  # position 5
    cache.step(one, drafted=drafted[2], then=(3, 4, 5))  # position 6
    cache.step(one, drafted=True, then=(6,))  # positions 7 to 9: the second block is full
    whole = [*PROMPT[:5], 1, 2, 3, 4, 5]
    assert cache.hits(whole) == (0 if not drafted[0] else SMALL)


def test_a_block_that_is_used_anew_is_as_good_as_any(cache: Cache) -> None:
    small = Cache(num_blocks=6)  # one is vLLM's own
    one = small.request(PROMPT)
    small.step(one, drafted=False)
    small.manager.free(one)
    other = small.request([*range(200, 214)])  # needs them all
    small.step(other, drafted=True)
    small.manager.free(other)
    assert small.hits([*range(200, 214)]) == 3 * SMALL


def test_at_a_swap_all_is_forgotten_also_what_a_running_request_uses_and_goes_on_to_fill(cache: Cache) -> None:
    running, ended = cache.request(PROMPT), cache.request([*range(300, 308), 1])
    cache.step(running, drafted=True)
    cache.step(ended, drafted=True)
    cache.manager.free(ended)
    cache.keys.forget()
    assert cache.hits(PROMPT) == cache.hits([*range(300, 308), 1]) == 0
    cache.step(running, drafted=True, then=(2, 3, 4, 5))  # half of the third block is the old draft's
    cache.step(running, drafted=True, then=(6, 7, 8, 9))
    follower = cache.request(PROMPT)
    cache.step(follower, drafted=True)
    assert cache.hits([*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8]) == 2 * SMALL


@pytest.mark.parametrize(("drafted", "fits", "lacks"), [(True, True, False), (False, True, True), (True, False, True)])
def test_a_request_of_a_step_without_the_draft_lacks_keys_from_then_on(
    cache: Cache, drafted: bool, fits: bool, lacks: bool
) -> None:
    """At rest, with speculation switched off, and beside a request at the end of the draft's context."""
    scheduler, one = TracingScheduler.__new__(TracingScheduler), cache.request(PROMPT)
    scheduler._came, scheduler._ran, scheduler.planner, scheduler.draft_keys = drafted, (one,), None, cache.keys
    scheduler._beyond = frozenset() if fits else frozenset([one.request_id])
    scheduler._settle()
    assert (GAPS in one.__dict__, one.__dict__[DRAFTED]) == (lacks, not lacks)


@pytest.mark.parametrize("at_end", [False, True])
def test_without_plans_a_request_that_wants_no_drafts_gets_none_and_what_vllm_fills_a_step_with_is_not_verified(
    cache: Cache, at_end: bool
) -> None:
    scheduler, one, off = TracingScheduler.__new__(TracingScheduler), cache.request(PROMPT), cache.request(OTHER)
    off.sampling_params.extra_args = {OPTIONS: DraftOptions("off")}
    scheduler.planner, scheduler.requests = None, {each.request_id: each for each in (one, off)}
    scheduler._beyond = frozenset([off.request_id]) if at_end else frozenset()
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda _, token_ids: token_ids)
    scheduler.update_draft_token_ids(DraftTokenIds([one.request_id, off.request_id], [[5, 6], [7, 8]]))
    assert (one.spec_token_ids, off.spec_token_ids) == ([] if at_end else [5, 6], [])


def test_many_swaps_leave_every_block_free(cache: Cache) -> None:
    for number in range(200):
        one = cache.request(PROMPT)
        cache.step(one, drafted=number % 3 > 0)
        cache.step(one, drafted=True)
        cache.keys.forget()
        cache.step(one, drafted=True)
        cache.manager.free(one)
    assert cache.manager.block_pool.get_num_free_blocks() == 63


@pytest.fixture(scope="module")
def started(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An engine and two drafts for it; each test leaves the first one loaded, and drafting on."""
    target = tmp_path_factory.mktemp("target")
    random.build(random.Params(num_layers=3), target)
    drafts = [save_tiny(eagle3, target, tmp_path_factory.mktemp("draft"), seed=seed, scale=0.05) for seed in (0, 5)]
    # Not "auto": in bfloat16 near ties of a random model would make drafts differ.
    with running(loop, target, drafts[0], dtype="float32", max_model_len=CONTEXT) as engine:
        yield engine, drafts


def prompts(seed: int) -> list[list[int]]:
    """One system prompt of three blocks and a half, and a question each."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, 12, size=7 * BLOCK // 2).tolist()
    return [system + rng.integers(3, 12, size=12).tolist() for _ in range(NUM_PROMPTS)]


async def answer_all(engine: VllmEngine, asked: list[list[int]], tag: str) -> tuple[list[Completion], list[int]]:
    """Return the answers, and how many tokens of each prompt were found in the prefix cache."""
    answers, hits = [], []
    sampling = SamplingParams(max_tokens=GREEDY.max_tokens, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(asked):
        last = await last_of(engine, prompt, sampling, f"{tag}-{number}", ALONE)
        answers.append(last.completion)
        hits.append(last.num_cached_tokens)
    return answers, hits


async def from_an_empty_cache(engine: VllmEngine, asked: list[list[int]], tag: str) -> list[Completion]:
    answers = []
    for number, prompt in enumerate(asked):
        await engine.llm.reset_prefix_cache()
        found, hits = await answer_all(engine, [prompt], f"{tag}-{number}")
        assert hits == [0]
        answers += found
    return answers


def num_alike(one: list[Completion], other: list[Completion]) -> int:
    """Count the answers that were drafted alike, token by token; the text must be the same."""
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in other]
    return sum(mine.drafted_ids == theirs.drafted_ids for mine, theirs in zip(one, other, strict=True))


@asynccontextmanager
async def a_long_answer(engine: VllmEngine, prompt: list[int], num_tokens: int) -> AsyncIterator[None]:
    """Keep a request running, which holds the blocks of its prompt, from its first token to the block's end."""
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.llm.generate({"prompt_token_ids": prompt}, sampling, f"long-{id(begun)}", ALONE):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    yield
    await reading


async def test_blocks_that_a_running_request_uses_are_forgotten_at_a_swap_too(started: Running) -> None:
    engine, (first, second) = started
    asked = prompts(2)
    async with a_long_answer(engine, asked[0], 200):
        await engine.swap_draft(second, "2")
        after, hits = await answer_all(engine, asked[1:3], "under-load")
    empty = await from_an_empty_cache(engine, asked[1:3], "no-load")
    await engine.swap_draft(first, "1")
    assert hits[0] == 0
    assert hits[1] >= 2 * BLOCK
    assert num_alike(after, empty) >= 1


async def test_an_answer_during_which_drafting_paused_is_no_start_for_the_next_turn(started: Running) -> None:
    engine, _ = started
    asked = prompts(4)[:4]
    sampling = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def answer_with_a_pause(prompt: list[int], tag: str) -> list[int]:
        token_ids: list[int] = []
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, sampling, tag, ALONE):
            token_ids += output.outputs[0].token_ids
            if engine.speculating != (not 8 <= len(token_ids) < 40):
                await engine.set_speculation(not engine.speculating)
        return token_ids

    turns = [
        prompt + await answer_with_a_pause(prompt, f"paused-{number}") + prompt[:8]
        for number, prompt in enumerate(asked)
    ]
    next_turns, _ = await answer_all(engine, turns, "next-turn")
    empty = await from_an_empty_cache(engine, turns, "empty-turn")
    assert num_alike(next_turns, empty) >= 3


async def test_a_prompt_read_beside_one_at_its_contexts_end_has_its_keys(started: Running) -> None:
    """By itself the runner would draft for nobody in a step in which a sequence does not fit the draft's context."""
    engine, _ = started
    asked = prompts(5)
    full = [(prompts(seed)[0] * 4)[: CONTEXT - 1] for seed in (6, 7, 8)]
    together = [*full[:2], asked[0], full[2]]  # the first is alone in its step, in which the others come
    answers = await asyncio.gather(
        *(engine.generate(prompt, GREEDY, f"beside-{number}") for number, prompt in enumerate(together))
    )
    assert [len(answer.token_ids) for answer in answers] == [1, 1, GREEDY.max_tokens, 1]
    after, hits = await answer_all(engine, asked[1:], "after-it")
    assert min(hits) > 0
    empty = await from_an_empty_cache(engine, asked[1:], "without-it")
    assert num_alike(after, empty) >= NUM_PROMPTS - 2
