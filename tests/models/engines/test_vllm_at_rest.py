"""A step in which nothing was drafted, and after which nothing will be, is that of an engine without a draft."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from models.core.throughput.cost import Time
from models.engines import Completion, LookUp
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.lengths import goodput
from tests.models.engines.answers import golden_of, last_of, require_none_different
from tests.models.engines.started import Loop, keep_costs, running

pytestmark = pytest.mark.engine

NUM_TOKENS, LOOKED_UP = 10, 6
THRESHOLD = 0.02
AUTO, OFF = DraftOptions("auto", "none", promised=1.0), DraftOptions("off", "none")
# A pass of the draft takes more than its tokens are worth, of which none is promised.
TIMES = (
    *(Time(num, num * rows, 0, 10 + 0.01 * num * rows) for num in (1, 8) for rows in (1, 4, 9)),
    *(Time(num, num, 1, 14.0) for num in (1, 8)),
)


@pytest.fixture(scope="module")
def engine(
    tiny_target: Path, tiny_draft: Path, loop: Loop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    keys = {
        "dtype": "float32",
        "enforce_eager": True,
        "num_draft_tokens": 3,
        "max_num_seqs": 8,
        "lengths": goodput.Params(explore=0.0),
        "lookup": LookUp(num_tokens=LOOKED_UP, shortest=NUM_TOKENS),
    }
    costs = keep_costs(tmp_path_factory.mktemp("costs"), tiny_target, tiny_draft, "float32", TIMES)
    with running(loop, tiny_target, tiny_draft, costs, worker="CountingWorker", **keys) as engine:
        yield engine


async def answers(
    engine: VllmEngine, options: DraftOptions, name: str, temperature: float = 0.0, num_tokens: int = NUM_TOKENS
) -> list[Completion]:
    """Answer prompts; look-up finds what was answered with the same key, if the answers have more tokens than these."""
    options = options._replace(key=options.key or name)

    async def one(number: int) -> Completion:
        wanted = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, seed=number, ignore_eos=True, logprobs=2
        )
        prompt = np.random.default_rng(number).integers(3, 67, size=40).tolist()
        return (await last_of(engine, prompt, wanted, f"{name}-{number}", options)).completion

    return [await one(0), *await asyncio.gather(*map(one, (1, 2, 3)))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("way", ["rests", "wants none", "switched off"])
async def test_where_nothing_is_drafted_nothing_is_done_for_a_draft_and_the_answers_are_the_same(
    engine: VllmEngine, way: str, temperature: float
) -> None:
    drafted = await answers(engine, DraftOptions("head"), f"drafted-{way}-{temperature}", temperature)
    assert min(max(one.drafted) for one in drafted) == 3
    await answers(engine, AUTO, f"before-{way}-{temperature}")  # keys are kept for a few steps
    await engine._call("count")
    await answers(engine, DraftOptions("head"), f"counts-{way}-{temperature}")
    counts = await engine._call("count")
    assert min(counts[what] for what in ("prepared", "verified", "asked to draft", "read states")) > 0
    if way == "switched off":
        await engine.set_speculation(False)
    plain = await answers(engine, OFF if way == "wants none" else AUTO, f"{way}-{temperature}", temperature)
    assert set(await engine._call("count")) == {"steps"}
    await engine.set_speculation(True)
    assert not any(sum(one.drafted) for one in plain)
    if temperature == 0:
        require_none_different(golden_of(plain), drafted, THRESHOLD)


async def test_look_up_goes_on_while_the_draft_rests(engine: VllmEngine) -> None:
    options = AUTO._replace(key="again")
    first = await answers(engine, options, "first", num_tokens=4 * NUM_TOKENS)
    await engine._call("count")
    again = await answers(engine, options, "again", num_tokens=4 * NUM_TOKENS)
    counts = await engine._call("count")
    assert max(drafted for one in again for drafted in one.drafted) == LOOKED_UP
    assert sum(sum(one.accepted) for one in again) > 0
    assert 0 < counts["verified"] < counts["steps"]
    assert "read states" not in counts
    require_none_different(golden_of(first), again, THRESHOLD)
