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
from models.core.drafting.draft_families import family_named, family_of, is_trained
from models.core.evaluation.acceptance import UNDRAFTED
from models.engines import Sampling
from models.engines import torch as reference
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.patches.dflash import norm_by_layer
from models.targets import random
from tests.models.drafts.tiny import save_tiny
from tests.models.engines.answers import answer_all, golden_of, require_none_different
from tests.models.engines.started import BLOCK, Loop, require_swaps, running

pytestmark = pytest.mark.engine

NOISE = 0.01
NUM_PROMPTS, NUM_SAME = 8, 6  # of so many answers, so many are drafted alike: in float32, but for near ties
GREEDY = Sampling(max_tokens=32, ignore_eos=True, num_logprobs=2)
Running = tuple[VllmEngine, Path, Path]
SERVED = [name for name in catalog.names("drafts") if family_named(name).SERVED]


def prompts() -> list[list[int]]:
    """Long enough for two blocks each to be found in the prefix cache."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 12, size=3 * BLOCK + 16).tolist() for _ in range(NUM_PROMPTS)]


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    random.build(random.Params(num_layers=3), target)
    save_tiny(family_named(request.param), target, draft, scale=NOISE, served=True)
    # Not "auto": in bfloat16 near ties of a random model would make drafts differ.
    with running(loop, target, draft, dtype="float32") as engine:
        yield engine, target, draft


async def test_output_is_the_targets_with_each_draft_and_what_is_drafted_is_what_the_reference_engine_drafts(
    served: Running, tmp_path: Path
) -> None:
    engine, target, draft = served
    other = save_tiny(family_of(draft), target, tmp_path, seed=5, scale=NOISE, served=True)
    found = await require_swaps(engine, prompts(), 32, draft, other, 0.02, is_trained(family_of(draft)))
    for directory, names in (
        (draft, ["first"]),
        (other, ["second", "again"]),
    ):  # with what the cache has of those before
        alone = await reference.TorchEngine.start(target, directory, reference.Params(dtype="float32"))
        theirs = await answer_all(alone, prompts(), GREEDY, NUM_PROMPTS, "torch")
        require_none_different(golden_of(found["off"]), theirs, 0.02)
        for name in names:
            pairs = zip(theirs, found[name], strict=True)
            same = [one.accepted == mine.accepted for one, mine in pairs if one.drafted_ids == mine.drafted_ids]
            assert len(same) >= NUM_SAME
            assert all(same)


async def test_neither_a_request_at_its_contexts_end_nor_one_without_drafts_stops_the_drafting_of_others(
    served: Running,
) -> None:
    engine, _, draft = served
    full = (prompts()[0] * 3)[: 256 - 12]
    asked = [(full, "head", 12), (prompts()[1], "off", 32), (prompts()[2], "head", 32), (full[::-1], "head", 12)]
    ways = [GREEDY.model_copy(update={"drafting": way, "max_tokens": most}) for _, way, most in asked]
    told = (
        engine.generate(prompt, way, f"at-{at}") for at, ((prompt, *_), way) in enumerate(zip(asked, ways, strict=True))
    )
    at_end, off, other, again_at_end = await asyncio.gather(*told)
    finds = all if is_trained(family_of(draft)) else any  # a text may not go on from where it is looked up
    assert finds(step > 0 for step in other.drafted[:-1]), other.drafted  # its length may cut the last one
    assert not any(off.drafted)
    assert off.trace("").drafted == ()
    for one in (at_end, again_at_end):
        assert len(one.token_ids) == 12
        assert len(one.trace("").drafted) == sum(match != UNDRAFTED for match in one.matches)


async def test_a_draft_of_another_family_is_refused_and_nothing_changes(served: Running, tmp_path: Path) -> None:
    engine, target, draft = served
    version = engine.draft_version
    name = next(name for name in ("eagle3", "lm") if family_named(name) is not family_of(draft))
    with pytest.raises(ValueError, match=f"is of family {name}, the served draft of"):
        await engine.swap_draft(save_tiny(family_named(name), target, tmp_path), "3")
    assert engine.draft_version == version


@pytest.mark.parametrize(("name", "k"), [("dflash", 7), ("medusa", 4)])
async def test_a_number_of_tokens_that_vllm_can_not_draft_with_a_draft_is_refused_before_anything_starts(
    name: str, k: int, tiny_target: Path, tmp_path: Path
) -> None:
    save_tiny(family_named(name), tiny_target, tmp_path, served=True)
    with pytest.raises(ValueError, match=f"drafts 3 tokens in every step of vLLM, no other number; got .* {k}"):
        await VllmEngine.start(tiny_target, tmp_path, Params(num_draft_tokens=k))


def test_dflashs_injected_keys_are_normed_with_the_gains_of_their_own_layers() -> None:
    """[L, T, heads, width] → x / √mean(x²), times what stands in the layer's row."""
    rng = torch.Generator().manual_seed(0)
    keys, gains = torch.randn(3, 5, 2, 16, generator=rng), torch.rand(3, 16, generator=rng)
    normed = norm_by_layer(SimpleNamespace(_k_norm_weights=gains, _rms_norm_eps=1e-6), keys)
    wanted = keys / keys.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * gains[:, None, None]
    torch.testing.assert_close(normed, wanted, rtol=1e-5, atol=1e-5)
