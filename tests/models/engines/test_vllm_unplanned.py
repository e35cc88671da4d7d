"""A vLLM whose proposer has another layout drafts by itself: the same number of tokens a step, and all else works."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.engines import Completion, Sampling
from models.engines.vllm import Params, fields
from models.engines.vllm.engine import VllmEngine
from tests.conftest import make_draft
from tests.models.engines.answers import answer_all, golden_of, require_none_different
from tests.models.engines.test_vllm_drafting import NUM_TOKENS, THRESHOLD, prompts

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
K = 2


def arrive_in_another_release(sender: int) -> fields.WithParent:
    """Run in the engine's process: what is read of vLLM's runner there is something that this release lacks."""
    from models.engines.vllm.patches import proposer

    proposer.READS = (*proposer.READS, "sequences")
    return fields._arrive(sender)


@pytest.fixture(scope="module")
def started(tiny_target: Path, tiny_draft: Path, loop: Loop) -> Iterator[tuple[VllmEngine, list[str]]]:
    """An engine over such a vLLM, and what was logged of its start."""
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("models.engines.vllm.engine")
    with pytest.MonkeyPatch.context() as patch:

        def reduce(self: fields.WithParent) -> tuple[Any, ...]:
            return arrive_in_another_release, (os.getpid(),)

        patch.setattr(fields.WithParent, "__reduce__", reduce)
        log.addHandler(listener)
        params = Params(num_draft_tokens=K, max_model_len=256, max_num_seqs=16, extra={"block_size": 32})
        engine = loop.run_until_complete(VllmEngine.start(tiny_target, tiny_draft, params, draft_version="1"))
        log.removeHandler(listener)
    yield engine, told
    loop.run_until_complete(engine.close())


async def answers(engine: VllmEngine, tag: str) -> list[Completion]:
    return await answer_all(
        engine, prompts(8), Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2), 8, tag
    )


async def test_it_is_told_in_one_line_and_each_step_drafts_the_same_number(
    started: tuple[VllmEngine, list[str]],
) -> None:
    engine, told = started
    why = "vLLM's CPUModelRunner has no sequences; another release is installed than wanted"
    assert [line for line in told if "drafts" in line] == [
        f"each step drafts {K} tokens and nothing is looked up: {why}"
    ]
    assert engine.unplanned == why
    assert engine.llm.throughput is None
    for one in await answers(engine, "fixed"):
        assert set(one.drafted[:-2]) == {K}  # at an answer's end fewer may fit
        assert not any(one.matches)


async def test_the_output_stays_the_targets_and_the_draft_can_be_swapped_checked_and_switched_off(
    started: tuple[VllmEngine, list[str]], tiny_target: Path, tmp_path: Path
) -> None:
    engine, _ = started
    drafted = await answers(engine, "drafted")
    other = make_draft(tiny_target, tmp_path, seed=7)
    await engine.swap_draft(other, "2")
    assert await engine.check_draft(other) < 0.05
    swapped = await answers(engine, "swapped")
    await engine.set_speculation(False)
    plain = await answers(engine, "plain")
    await engine.set_speculation(True)
    assert not any(sum(one.drafted) for one in plain)
    assert [one.accepted for one in swapped] != [one.accepted for one in drafted]
    for outputs in (drafted, swapped):
        require_none_different(golden_of(plain), outputs, THRESHOLD)


async def test_what_needs_plans_is_refused_with_the_reason(started: tuple[VllmEngine, list[str]]) -> None:
    engine, _ = started
    with pytest.raises(ValueError, match=r"is handed rejected tokens too, and vLLM's CPUModelRunner has no sequences"):
        await engine.capture_states(1 << 20)
    assert await engine.forget_answers() == 0
