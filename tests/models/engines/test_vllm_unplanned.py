"""A vLLM that drafts by itself, as on a GPU, or whose proposer has another layout: K tokens a step, and all else works.

A CPU's platform schedules synchronously; the asynchronous scheduler is tested in `test_vllm_launch`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.engines import Sampling
from models.engines.vllm import engine as module
from models.engines.vllm import fields
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.launch import RUNNER, VLLM_DRAFTS, Speculation
from models.engines.vllm.measuring import Mode, Times
from tests.conftest import make_draft
from tests.models.engines.answers import answer_all
from tests.models.engines.started import Loop, require_swaps, running, short
from tests.models.engines.test_vllm_drafting import NUM_TOKENS, THRESHOLD, prompts

pytestmark = pytest.mark.engine

Unplanned = tuple[VllmEngine, str]
K = 2
LAYOUT = "vLLM's CPUModelRunner has no sequences; another release is installed than wanted"


def arrive_in_another_release(sender: int) -> fields.WithParent:
    """Run in the engine's process: what is read of vLLM's runner there is something that this release lacks."""
    from models.engines.vllm.patches import proposer

    proposer.READS = (*proposer.READS, "sequences")
    return fields._arrive(sender)


@contextmanager
def by_itself(loop: Loop, target: Path, draft: Path) -> Iterator[Unplanned]:
    wanted = Speculation(target, draft, short(num_draft_tokens=K), "float32", True, None, on_gpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(RUNNER, raising=False)
        starting = VllmEngine._launch(wanted, "target", "1", Mode(True, "here"), Times(None, {}))
        engine = loop.run_until_complete(starting)
    yield engine, VLLM_DRAFTS
    loop.run_until_complete(engine.close())


@contextmanager
def of_another_layout(loop: Loop, target: Path, draft: Path) -> Iterator[Unplanned]:
    def reduce(self: fields.WithParent) -> tuple[Any, ...]:
        return arrive_in_another_release, (os.getpid(),)

    told: list[str] = []
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fields.WithParent, "__reduce__", reduce)
            patch.setattr(module.log, "warning", lambda text, *of: told.append(text % of))
            engine = stack.enter_context(running(loop, target, draft, num_draft_tokens=K))
        assert told == [f"each step drafts {K} tokens and nothing is looked up: {LAYOUT}"]
        yield engine, LAYOUT


@pytest.fixture(scope="module", params=[by_itself, of_another_layout])
def started(request: pytest.FixtureRequest, loop: Loop, tiny_target: Path, tiny_draft: Path) -> Iterator[Unplanned]:
    """An engine over such a vLLM, and why nothing is planned."""
    with request.param(loop, tiny_target, tiny_draft) as found:
        yield found


async def test_each_step_drafts_the_same_number_and_what_needs_plans_is_refused_with_the_reason(
    started: Unplanned,
) -> None:
    engine, why = started
    assert (engine.unplanned, engine.llm.throughput) == (why, None)
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    for one in await answer_all(engine, prompts(4), sampling, 4, "fixed"):
        assert set(one.drafted[:-2]) == {K}  # at an answer's end fewer may fit
        assert not any(one.matches)
    with pytest.raises(ValueError, match=f"is handed rejected tokens too, and {re.escape(why)}"):
        await engine.capture_states(1 << 20)
    assert await engine.forget_answers() == 0


async def test_the_output_stays_the_targets_and_the_draft_can_be_swapped_checked_and_switched_off(
    started: Unplanned, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    other = make_draft(tiny_target, tmp_path, seed=7)
    await require_swaps(started[0], prompts(8), NUM_TOKENS, tiny_draft, other, THRESHOLD, apart=True)
