"""One stream says the same to the last bit with a draft and without, from a cold prefix cache and from a hot one.

And so do several at once where the engine is batch invariant. The target's weights lie on grids, as those of a GGUF
file do, so that two kernels share its products; those of the batch-invariant one are floats. Gaps of log-probabilities
are compared, because a token is the same in spite of many other bits.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.core.throughput.cost import Time
from models.engines import Completion, LookUp, Sampling, Way
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import place_of
from models.lengths import goodput
from models.targets import random
from tests.conftest import make_draft
from tests.models.core.layers.published import build_on_grids
from tests.models.engines.answers import answer_all
from tests.models.engines.started import BLOCK, Loop, keep_costs, running

pytestmark = pytest.mark.engine

K, LOOKED_UP, STREAMS = 3, 8, 6
# By these drafting pays, whatever was verified.
TIMES = (
    *(Time(num, num * rows, 0, 15.0 + 0.01 * num * rows) for num in (1, 8) for rows in (1, 4, 9)),
    *(Time(num, num, 1, ms) for num, ms in ((1, 15.1), (8, 15.5))),
)


KEYS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "num_draft_tokens": K,
    "lengths": goodput.Params(explore=0.0),
    "lookup": LookUp(num_tokens=LOOKED_UP, shortest=2, remembered=0),
}


@pytest.fixture(scope="module")
def engine(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    target, folder, costs = (tmp_path_factory.mktemp(name) for name in ("target", "draft", "costs"))
    build_on_grids(target)
    draft = make_draft(target, folder, seed=0)
    keep_costs(costs, target, draft, "bfloat16", TIMES, 1 + LOOKED_UP)
    with running(loop, target, draft, costs, worker="PackedWorker", max_num_seqs=4, **KEYS) as engine:
        yield engine


async def ask(engine: VllmEngine, drafting: Way, name: str, num: int = 3, streams: int = 1) -> list[Completion]:
    """Ask prompts, so many at a time; their blocks are found in a hot cache."""
    rng = np.random.default_rng(5)
    sampling = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2, drafting=drafting)
    asked = [rng.integers(3, 67, size=20).tolist() * 4 + [number] for number in range(num)]
    return await answer_all(engine, asked, sampling, streams, name)


def bits(answers: list[Completion]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(one.token_ids, one.gaps) for one in answers]


@pytest.fixture
def invariant_engine(loop: Loop, tmp_path: Path) -> Iterator[VllmEngine]:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("a processor without AVX512_BF16 has no product of bfloat16")
    target, folder, costs = (tmp_path / name for name in ("target", "draft", "costs"))
    for made in (target, folder, costs):
        made.mkdir()
    random.build(random.Params(), target)
    draft, place = make_draft(target, folder, seed=0), place_of(Params(batch_invariant=True), "cpu")
    keep_costs(costs, target, draft, "bfloat16", TIMES, 1 + LOOKED_UP, place)
    keys = {**KEYS, "batch_invariant": True, "max_num_seqs": STREAMS}
    keys["extra"] = {"max_num_batched_tokens": 96, "block_size": BLOCK}  # prompts are cut, beside others' rows
    with running(loop, target, draft, costs, **keys) as engine:
        yield engine


async def test_several_streams_of_a_batch_invariant_engine_say_what_each_says_alone(
    invariant_engine: VllmEngine,
) -> None:
    engine = invariant_engine
    assert engine.mode.why.endswith("; batch invariant")
    await engine.set_speculation(False)
    alone = await ask(engine, "off", "alone", STREAMS)
    await engine.forget_answers()
    assert bits(await ask(engine, "off", "together", STREAMS, STREAMS)) == bits(alone)
    await engine.set_speculation(True)
    for way in ("head", "auto"):
        await engine.forget_answers()
        drafted = await ask(engine, way, way, STREAMS, STREAMS)
        assert sum(sum(one.drafted) for one in drafted) > 0
        assert bits(drafted) == bits(alone)
    assert sum(sum(one.accepted) for one in drafted) > 0


async def test_one_stream_says_the_same_with_any_draft_and_without(engine: VllmEngine) -> None:
    assert "read the few bits" in engine.mode.why
    assert await engine._call("small_batch_limit") >= 1 + LOOKED_UP
    await engine.set_speculation(False)
    cold = await ask(engine, "off", "cold")
    assert bits(await ask(engine, "off", "hot")) == bits(cold)
    await engine.set_speculation(True)
    head, looked_up = [await ask(engine, way, way) for way in ("head", "auto")]
    assert {num for one in head for num in one.drafted} >= {K}
    assert max(num for one in looked_up for num in one.drafted) > K
    assert sum(sum(one.accepted) for one in looked_up) > 0
    assert bits(head) == bits(looked_up) == bits(cold)
    assert await engine._call("drafts_in_one_call")


async def test_one_stream_says_the_same_after_another_draft_was_swapped_in(engine: VllmEngine, tmp_path: Path) -> None:
    before = await ask(engine, "head", "before")
    await engine.swap_draft(make_draft(Path(engine.args.model), tmp_path, seed=1), "2")
    after = await ask(engine, "head", "after")
    assert bits(after) == bits(before)
    assert [one.drafted_ids for one in after] != [one.drafted_ids for one in before]


async def test_a_seed_draws_the_same_with_any_draft_and_without(engine: VllmEngine, tmp_path: Path) -> None:
    async def drawn(drafting: Way, tag: str, **limits: float) -> list[Completion]:
        settings = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0, "num_logprobs": 2, "drafting": drafting}
        seeded = [Sampling(**settings, **limits, seed=seed) for seed in range(4)]
        return [await engine.generate([5, 6, 7] * 9, one, f"{tag}-{drafting}-{one.seed}") for one in seeded]

    plain = await drawn("off", "first")
    assert len({one.token_ids for one in plain}) == len(plain)
    for tag in ("first", "second"):
        head, looked_up = [await drawn(way, tag) for way in ("head", "auto")]
        assert bits(head) == bits(looked_up) == bits(plain)
        assert sum(sum(one.accepted) for one in head) > 0
        (folder := tmp_path / tag).mkdir()
        await engine.swap_draft(make_draft(Path(engine.args.model), folder, seed=2), tag)
    assert await engine._call("drafts_in_one_call")
    cut = [await drawn(way, "cut", top_p=0.8, top_k=20) for way in ("off", "head", "auto")]
    assert bits(cut[0]) == bits(cut[1]) == bits(cut[2]) != bits(plain)
