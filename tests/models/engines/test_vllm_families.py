"""Every draft family in the production engine: same output, the reference engine's drafts, swaps of weights.

The family that recipes use has a file of its own as well (test_vllm.py), with the session's engine.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models import catalog
from models.core.drafting.draft_families import family_named, family_of
from models.core.evaluation.acceptance import UNDRAFTED
from models.core.evaluation.golden import Golden, equal_output
from models.engines import Completion, Engine, Sampling
from models.engines import torch as reference
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.patches.dflash import norm_by_layer
from models.targets import random
from tests.models.drafts.tiny import save_tiny

pytestmark = pytest.mark.engine

NOISE = 0.01
NUM_PROMPTS, NUM_SAME = 8, 6  # of so many answers, so many are drafted alike: in float32, but for near ties
BLOCK = 32  # tokens of a block of the prefix cache; 128 by default, which no short prompt fills
GREEDY = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2)
Running = tuple[VllmEngine, Path, Path]


def prompts() -> list[list[int]]:
    """Long enough for two blocks each to be found in the prefix cache."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 12, size=3 * BLOCK + 16).tolist() for _ in range(NUM_PROMPTS)]


SERVED = [name for name in catalog.names("drafts") if family_named(name).SERVED]


@pytest.fixture(scope="module", params=SERVED)
def running(
    request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    random.build(random.Params(num_layers=3), target)
    save_tiny(family_named(request.param), target, draft, scale=NOISE, served=True)
    # Not "auto": in bfloat16 near ties of a random model would make drafts differ.
    params = Params(dtype="float32", max_model_len=256, max_num_seqs=16, extra={"block_size": BLOCK})
    engine = loop.run_until_complete(VllmEngine.start(target, draft, params, draft_version="1"))
    yield engine, target, draft
    loop.run_until_complete(engine.close())


async def answer_all(engine: Engine, tag: str) -> list[Completion]:
    asked = enumerate(prompts())
    return list(await asyncio.gather(*(engine.generate(prompt, GREEDY, f"{tag}-{number}") for number, prompt in asked)))


def test_output_is_equal_with_and_without_and_drafts_are_the_reference_engines(
    running: Running, loop: asyncio.AbstractEventLoop
) -> None:
    engine, target, draft = running

    async def run() -> list[list[Completion]]:
        on = await answer_all(engine, "on")
        await engine.set_speculation(False)
        off = await answer_all(engine, "off")
        await engine.set_speculation(True)
        other = await reference.TorchEngine.start(target, draft, reference.Params(dtype="float32"))
        return [on, off, await answer_all(engine, "again"), await answer_all(other, "torch")]

    on, off, again, torchs = loop.run_until_complete(run())
    for answers in (on, again, torchs):
        for one, plain in zip(answers, off, strict=True):
            golden = Golden(prompt_ids=plain.prompt_ids, token_ids=plain.token_ids, gaps=plain.gaps)
            assert equal_output(golden, one.token_ids, 0.02) != "different"
    assert sum(sum(one.drafted) for one in off) == 0
    assert sum(sum(one.accepted) for one in on) > 0
    same = [(mine, theirs) for mine, theirs in zip(torchs, on, strict=True) if mine.drafted_ids == theirs.drafted_ids]
    assert len(same) >= NUM_SAME
    assert all(mine.accepted == theirs.accepted for mine, theirs in same)


def test_weights_are_swapped_proved_and_told_apart(
    running: Running, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    engine, target, draft = running
    other = save_tiny(family_of(draft), target, tmp_path, seed=5, scale=NOISE, served=True)

    async def run() -> list[list[Completion]]:
        before = await answer_all(engine, "before")
        assert await engine.check_draft(draft) < 0.05
        await engine.swap_draft(other, "2")
        assert engine.draft_version == "2"
        assert await engine.check_draft(other) < 0.05
        if not family_of(draft).TRAINED:
            return [before]
        with pytest.raises(ValueError, match="of the loaded draft is off by"):
            await engine.check_draft(draft)
        after = await answer_all(engine, "after")
        alone = await reference.TorchEngine.start(target, other, reference.Params(dtype="float32"))
        return [before, after, await answer_all(alone, "alone")]

    before, *rest = loop.run_until_complete(run())
    if not rest:
        return
    after, alone = rest
    assert [one.drafted_ids for one in before] != [one.drafted_ids for one in after]
    assert sum(a.drafted_ids == b.drafted_ids for a, b in zip(after, alone, strict=True)) >= NUM_SAME


def test_neither_a_request_at_its_contexts_end_nor_one_without_drafts_stops_the_drafting_of_others(
    running: Running, loop: asyncio.AbstractEventLoop
) -> None:
    engine, _, draft = running
    full = (prompts()[0] * 3)[: 256 - 12]

    async def run() -> list[Completion]:
        asked = [(full, "head", 12), (prompts()[1], "off", 32), (prompts()[2], "head", 32), (full[::-1], "head", 12)]
        return list(
            await asyncio.gather(
                *(
                    engine.generate(prompt, GREEDY.model_copy(update={"drafting": way, "max_tokens": most}), f"at-{at}")
                    for at, (prompt, way, most) in enumerate(asked)
                )
            )
        )

    at_end, off, other, again_at_end = loop.run_until_complete(run())
    finds = all if family_of(draft).TRAINED else any  # a text may hold nothing that goes on from where it is looked up
    assert finds(step > 0 for step in other.drafted[:-1]), other.drafted  # its length may cut the last one
    assert not any(off.drafted)
    assert off.trace("").drafted == ()
    for one in (at_end, again_at_end):
        assert len(one.token_ids) == 12
        assert len(one.trace("").drafted) == sum(match != UNDRAFTED for match in one.matches)


def test_a_draft_of_another_family_is_refused_and_nothing_changes(
    running: Running, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    engine, target, draft = running
    version = engine.draft_version
    for name in catalog.names("drafts"):
        family, directory = family_named(name), tmp_path / name
        if family is not family_of(draft):
            directory.mkdir()
            save_tiny(family, target, directory)
            with pytest.raises(ValueError, match=f"is of family {name}, the served draft of"):
                loop.run_until_complete(engine.swap_draft(directory, "3"))
    assert engine.draft_version == version


@pytest.mark.parametrize(("name", "k"), [("dflash", 7), ("medusa", 4)])
def test_a_number_of_tokens_that_vllm_can_not_draft_with_a_draft_is_refused_before_anything_starts(
    name: str, k: int, loop: asyncio.AbstractEventLoop, tiny_target: Path, tmp_path: Path
) -> None:
    save_tiny(family_named(name), tiny_target, tmp_path, served=True)
    with pytest.raises(ValueError, match=f"drafts 3 tokens in every step of vLLM, no other number; got .* {k}"):
        loop.run_until_complete(VllmEngine.start(tiny_target, tmp_path, Params(num_draft_tokens=k)))


def test_dflashs_injected_keys_are_normed_with_the_gains_of_their_own_layers() -> None:
    """[L, T, heads, width] → x / √mean(x²), times what stands in the layer's row."""
    rng = torch.Generator().manual_seed(0)
    keys, gains = torch.randn(3, 5, 2, 16, generator=rng), torch.rand(3, 16, generator=rng)
    normed = norm_by_layer(SimpleNamespace(_k_norm_weights=gains, _rms_norm_eps=1e-6), keys)
    wanted = keys / keys.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * gains[:, None, None]
    torch.testing.assert_close(normed, wanted, rtol=1e-5, atol=1e-5)
