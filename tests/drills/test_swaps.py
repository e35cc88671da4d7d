"""F25: a hundred swaps in a row while requests are in flight."""

import asyncio
from pathlib import Path

import pytest

from models.core.evaluation.golden import Golden
from models.engines import Completion
from models.engines.vllm.engine import VllmEngine
from tests.conftest import make_draft
from tests.models.engines.answers import answer_all
from tests.models.engines.test_vllm import GREEDY, prompts, reference, require_equal

__all__ = ["reference"]
pytestmark = pytest.mark.engine

NUM_SWAPS = 100
NUM_CLIENTS = 4
IN_FLIGHT_EACH = 4


def test_f25_a_hundred_swaps_in_a_row_fail_cut_and_change_no_request(
    engine: VllmEngine,
    loop: asyncio.AbstractEventLoop,
    reference: tuple[list[Golden], float],
    tiny_draft: Path,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    drafts = [make_draft(tiny_target, tmp_path, seed=7), tiny_draft]

    async def run() -> list[list[Completion]]:
        ended = asyncio.Event()

        async def client(number: int) -> list[list[Completion]]:
            rounds: list[list[Completion]] = []
            while not ended.is_set():
                tag = f"swaps{number}-{len(rounds)}"
                rounds.append(await answer_all(engine, prompts(20), GREEDY, IN_FLIGHT_EACH, tag))
            return rounds

        clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
        for number in range(NUM_SWAPS):
            draft = drafts[number % 2]
            await engine.swap_draft(draft, str(number + 2))
            assert await engine.check_draft(draft) < 0.05
        ended.set()
        return [answers for rounds in await asyncio.gather(*clients) for answers in rounds]

    rounds = loop.run_until_complete(run())
    for outputs in rounds:
        require_equal(reference, outputs)
        assert all(len(one.token_ids) == GREEDY.max_tokens and one.finish_reason == "length" for one in outputs)
    assert len({one.draft_version for outputs in rounds for one in outputs}) > NUM_SWAPS / 10
