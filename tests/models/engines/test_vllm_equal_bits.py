"""One stream says the same to the last bit with a draft and without, from a cold prefix cache and from a hot one.

The target's weights lie on grids, as those of a GGUF file do, so that two kernels share its products. Gaps of
log-probabilities are compared, because a token is the same in spite of many other bits.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import vllm

from models.core.throughput.cost import Cost, Time, save_cost
from models.engines import Completion, LookUp, Sampling, Way
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import measured_for
from models.lengths import goodput
from tests.conftest import make_draft
from tests.models.core.layers.published import build_on_grids

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
K, LOOKED_UP = 3, 8
# By these drafting pays, whatever was verified.
TIMES = (
    *(Time(num, num * rows, 0, 15.0 + 0.01 * num * rows) for num in (1, 8) for rows in (1, 4, 9)),
    *(Time(num, num, 1, ms) for num, ms in ((1, 15.1), (8, 15.5))),
)
BLOCK = 32


@pytest.fixture(scope="module")
def engine(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    target, folder, costs = (tmp_path_factory.mktemp(name) for name in ("target", "draft", "costs"))
    build_on_grids(target)
    draft = make_draft(target, folder, seed=0)
    facts = measured_for(target, draft, "bfloat16", True, vllm.__version__, 1 + LOOKED_UP)
    save_cost(Cost.measured(TIMES, facts), costs / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    params = Params(
        dtype="bfloat16",
        enforce_eager=True,
        num_draft_tokens=K,
        max_model_len=256,
        max_num_seqs=4,
        lengths=goodput.Params(explore=0.0),
        lookup=LookUp(num_tokens=LOOKED_UP, shortest=2, remembered=0),
    )
    extra = {"block_size": BLOCK, "worker_cls": "tests.models.engines.packed.PackedWorker"}
    params = params.model_copy(update={"extra": extra})  # no recipe may name a worker
    engine = loop.run_until_complete(VllmEngine.start(target, draft, params, costs=costs))
    yield engine
    loop.run_until_complete(engine.close())


def ask(loop: Loop, engine: VllmEngine, drafting: Way, name: str) -> list[Completion]:
    """Ask prompts one after the other; their blocks are found in a hot cache."""
    rng = np.random.default_rng(5)
    sampling = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2, drafting=drafting)
    answers = []
    for number in range(3):
        prompt = rng.integers(3, 67, size=20).tolist() * 4 + [number]
        answers.append(loop.run_until_complete(engine.generate(prompt, sampling, f"{name}-{number}")))
    return answers


def bits(answers: list[Completion]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(one.token_ids, one.gaps) for one in answers]


def test_one_stream_says_the_same_with_any_draft_and_without(engine: VllmEngine, loop: Loop) -> None:
    assert "read the few bits" in engine.mode.why
    loop.run_until_complete(engine.set_speculation(False))
    cold = ask(loop, engine, "off", "cold")
    hot = ask(loop, engine, "off", "hot")
    assert bits(hot) == bits(cold)
    loop.run_until_complete(engine.set_speculation(True))
    head, looked_up = (ask(loop, engine, way, way) for way in ("head", "auto"))
    assert {num for one in head for num in one.drafted} >= {K}
    assert max(num for one in looked_up for num in one.drafted) > K
    assert sum(sum(one.accepted) for one in looked_up) > 0
    assert bits(head) == bits(cold)
    assert bits(looked_up) == bits(cold)
    assert loop.run_until_complete(engine._call("drafts_in_one_call"))


def test_one_stream_says_the_same_after_another_draft_was_swapped_in(
    engine: VllmEngine, loop: Loop, tmp_path: Path
) -> None:
    before = ask(loop, engine, "head", "before")
    other = make_draft(Path(engine.args.model), tmp_path, seed=1)
    loop.run_until_complete(engine.swap_draft(other, "2"))
    after = ask(loop, engine, "head", "after")
    assert bits(after) == bits(before)
    assert [one.drafted_ids for one in after] != [one.drafted_ids for one in before]


def test_sampled_requests_are_drafted_so_too(engine: VllmEngine, loop: Loop) -> None:
    sampling = Sampling(max_tokens=64, ignore_eos=True, temperature=1.0, drafting="head")
    answer = loop.run_until_complete(engine.generate([5, 6, 7] * 9, sampling, "sampled"))
    assert len(answer.token_ids) == 64
    assert sum(answer.accepted) > 0


def test_so_many_rows_read_the_grid_as_one_sequence_has_verified_or_more(engine: VllmEngine, loop: Loop) -> None:
    assert loop.run_until_complete(engine._call("small_batch_limit")) >= 1 + LOOKED_UP
