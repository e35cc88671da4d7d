"""States are captured with a head that does not read the target's last layer, which training needs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams

from infra.artifacts import write_manifest
from models.drafts import eagle3
from models.engines import Completion
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.engines.vllm.worker import DraftWorker
from tests.conftest import shake
from tests.models.engines.answers import require_the_targets, written
from tests.models.engines.test_vllm_drafting import HIDDEN, prompts

pytestmark = pytest.mark.engine

TAPS, LAST = (0, 1), 2  # of the tiny target's two layers


@pytest.fixture(scope="module")
def engine(
    tiny_target: Path, loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    directory, counts = tmp_path_factory.mktemp("draft"), np.zeros(259)
    counts[3:67] = 1
    head = eagle3.create(eagle3.Params(vocab_size=64, aux_layers=TAPS), tiny_target, counts)
    shake(head, 0.02, 0)
    eagle3.save(head, directory)
    write_manifest(directory)
    params = Params(num_draft_tokens=2, max_model_len=256, max_num_seqs=16, extra={"block_size": 32})
    engine = loop.run_until_complete(VllmEngine.start(tiny_target, directory, params, captures=True))
    yield engine
    loop.run_until_complete(engine.close())


async def test_the_states_of_its_layers_and_of_the_last_are_those_that_the_target_computes(
    engine: VllmEngine, tiny_target: Path, tmp_path: Path
) -> None:
    done: list[Completion] = []

    async def one(number: int, prompt: list[int]) -> None:
        sampled = SamplingParams(max_tokens=24, temperature=number % 2, seed=number, ignore_eos=True)
        async for _ in engine.llm.generate({"prompt_token_ids": prompt}, sampled, f"last-{number}"):
            pass

    assert await engine.capture_states(1 << 24) == (len(TAPS) + 1) * HIDDEN
    engine.llm.options_of = lambda name, _: DraftOptions("head", "chat", "key", capture=name)
    engine.llm.on_finish = lambda completion, _: done.append(completion)
    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(4))))
    assert await written(engine, done, tmp_path, len(done)) == {"written": 4}
    assert all(sum(one.drafted) for one in done)
    assert require_the_targets(done, tiny_target, tmp_path, (*TAPS, LAST), HIDDEN) == {0}


async def test_the_head_gets_its_own_layers_alone_and_can_be_swapped(engine: VllmEngine) -> None:
    assert engine.draft is not None
    assert await engine.check_draft(engine.draft) < 0.05
    assert await engine.swap_draft(engine.draft, "again") > 0


def test_without_the_last_layer_nothing_is_captured_and_the_layers_are_named() -> None:
    text = SimpleNamespace(num_hidden_layers=30)
    worker = SimpleNamespace(
        get_model=lambda: SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layers=(27, 2, 15))),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)),
    )
    told = "the target hands out its layers [2, 15, 27] to the draft and not its last, 30"
    assert DraftWorker.capture_states(worker, 1 << 20) == {"refused": told}  # type: ignore[arg-type]
