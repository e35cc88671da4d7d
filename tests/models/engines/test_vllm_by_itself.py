"""An engine in which vLLM drafts by itself, as on a GPU, started on a CPU: all but what only a GPU has.

A CPU's platform schedules synchronously; the asynchronous scheduler is tested in `test_vllm_launch`.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.engines import Completion, Sampling
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.launch import RUNNER, VLLM_DRAFTS, Speculation
from models.engines.vllm.measuring import Mode, Times
from tests.conftest import make_draft
from tests.models.engines.answers import answer_all, golden_of, require_none_different
from tests.models.engines.test_vllm_drafting import NUM_TOKENS, THRESHOLD, prompts

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
K = 2


@pytest.fixture(scope="module")
def engine(tiny_target: Path, tiny_draft: Path, loop: Loop) -> Iterator[VllmEngine]:
    params = Params(num_draft_tokens=K, max_model_len=256, max_num_seqs=16, extra={"block_size": 32})
    wanted = Speculation(tiny_target, tiny_draft, params, "float32", True, None, on_gpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(RUNNER, raising=False)
        starting = VllmEngine._launch(wanted, "target", "1", Mode(True, "here"), Times(None, {}))
        engine = loop.run_until_complete(starting)
    yield engine
    loop.run_until_complete(engine.close())


async def answers(engine: VllmEngine, tag: str) -> list[Completion]:
    return await answer_all(
        engine, prompts(8), Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2), 8, tag
    )


async def test_drafts_are_swapped_checked_and_left_unused_and_the_output_stays_the_targets(
    engine: VllmEngine, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    assert engine.unplanned == VLLM_DRAFTS
    assert engine.llm.vllm_config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert await engine.check_draft(tiny_draft) < 0.05
    drafted = await answers(engine, "drafted")
    other = make_draft(tiny_target, tmp_path, seed=7)
    await engine.swap_draft(other, "2")
    assert await engine.check_draft(other) < 0.05
    with pytest.raises(ValueError, match="of the loaded draft is off by"):
        await engine.check_draft(tiny_draft)
    swapped = await answers(engine, "swapped")
    await engine.set_speculation(False)
    plain = await answers(engine, "plain")
    await engine.set_speculation(True)
    again = await answers(engine, "again")
    assert all(max(one.drafted) == K for one in (*drafted, *swapped, *again))
    assert not any(sum(one.drafted) for one in plain)
    assert [one.accepted for one in swapped] != [one.accepted for one in drafted]
    assert {one.draft_version for one in drafted} == {"1"} and {one.draft_version for one in again} == {"2"}
    for outputs in (drafted, swapped, again):
        require_none_different(golden_of(plain), outputs, THRESHOLD)


async def test_what_its_worker_does_not_have_is_told_or_not_asked_for(engine: VllmEngine) -> None:
    assert await engine.forget_answers() == 0
    with pytest.raises(ValueError, match="rejected tokens too, and on a GPU vLLM drafts by itself"):
        await engine.capture_states(1 << 20)
