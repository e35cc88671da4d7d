"""Beside many others, a stream's event carries several tokens; what it carries is the same."""

import asyncio
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.tap import MOST_MERGED
from tests.models.engines.test_vllm_drafting import prompts

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
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


def test_the_more_streams_run_the_more_tokens_an_event_waits_for_up_to_four(plain: VllmEngine, loop: Loop) -> None:
    async def run() -> list[list[list[int]]]:
        return list(await asyncio.gather(*(stream(plain, number) for number in range(NUM_STREAMS))))

    plain.llm.merge_streams = 4
    ended: dict[str, tuple[int, ...]] = {}
    plain.llm.on_finish = lambda completion, _: ended.update({completion.request_id: completion.token_ids})
    crowded = loop.run_until_complete(run())
    plain.llm.on_finish = None
    for number, events in enumerate(crowded):
        assert [token for event in events for token in event] == list(ended[f"events-{number}"])
        assert len(events[0]) == 1  # nobody waits longer for a first token
        merged = min(1 + number // 4, MOST_MERGED)
        assert all(len(event) >= merged for event in events[1:-1])
    assert min(len(event) for event in crowded[0][1:-1]) == 1
    assert all(len(events) < sum(map(len, events)) / 2 for events in crowded[-4:])


def test_a_client_that_asks_for_larger_events_gets_them_with_few_streams_too(plain: VllmEngine, loop: Loop) -> None:
    plain.llm.merge_streams = 4
    events = loop.run_until_complete(stream(plain, 0, stream_interval=6))
    assert all(len(event) >= 6 for event in events[1:-1])
    assert loop.run_until_complete(stream(plain, 1)) != events
