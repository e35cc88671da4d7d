"""A published head as vLLM loads it by itself, and as it was imported: the same drafts, the reference engine's too.

And heads beside targets of other layouts than Llama's, which the reference can't run. What a head is scored to accept,
on the states that transformers gives, vLLM accepts only if it hands out the same residual streams, and if the head
reads tokens there by the same vectors.

vLLM by itself reads a key too many in each pass after the first: on a CPU two lengths are one tensor, which it counts
up twice. Drafts of redraft's proposer don't, so that beyond their first tokens they are held to the reference engine's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import eagle3
from models.engines import Completion, Engine, Sampling
from models.engines import torch as reference
from models.engines.vllm import patches
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.measuring import Mode, Times
from models.engines.vllm.tap import InstrumentedLLM
from tests.conftest import shake
from tests.models.engines.answers import answer_all, num_scored_alike
from tests.models.engines.started import require_swaps, short
from tests.models.engines.test_vllm_families import NUM_SAME, prompts
from tests.models.families import write_family
from tests.models.published import Change, like_eagle31, like_qwen3, published

pytestmark = pytest.mark.engine

GREEDY = Sampling(max_tokens=32, ignore_eos=True)


async def answer(engine: Engine) -> list[Completion]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 67, size=8 + number % 9).tolist() for number in range(12)]
    return await answer_all(engine, prompts, GREEDY, 1, "published")


def start_as_it_is(target: Path, head: Path) -> VllmEngine:
    """Start vLLM on a published directory, which no family here takes as a draft of its own."""
    args = AsyncEngineArgs(
        model=str(target),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager=True,
        distributed_executor_backend="mp",
        worker_cls="models.engines.vllm.worker.DraftWorker",
        scheduler_cls="models.engines.vllm.scheduler.TracingScheduler",
        async_scheduling=False,
        speculative_config={
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 3,
            "disable_padded_drafter_batch": True,  # as redraft starts it
        },
    )
    patches.install("frontend")
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    llm = InstrumentedLLM.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
    llm.speculating, llm.rules = True, short().rules
    mode, unkept = Mode(eager=True, why="a test"), Times(None, {})
    return VllmEngine(llm, args, head, setup=None, mode=mode, times=unkept)


def num_same(answers: Sequence[Completion], others: Sequence[Completion]) -> int:
    return sum(one.drafted_ids == other.drafted_ids for one, other in zip(answers, others, strict=True))


def by_place(answer: Completion) -> dict[int, int]:
    """Return place of an answer to what was drafted first there."""
    found, place = {}, 0
    for drafted, num_accepted in zip(answer.drafted_ids, answer.accepted, strict=True):
        found |= {place: drafted[0]} if drafted else {}
        place += 1 + num_accepted
    return found


def num_alike(answers: Sequence[Completion], others: Sequence[Completion]) -> int:
    """Count the answers at all of whose places the same was drafted first, where both drafted."""
    pairs = ((by_place(one), by_place(other)) for one, other in zip(answers, others, strict=True))
    return sum(all(one[place] == other[place] for place in one.keys() & other.keys()) for one, other in pairs)


def borrowing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Make of a head one of EAGLE-3.1 that says all of the target's tokens, by the target's output matrix."""
    like_eagle31(config, tensors)
    config["draft_vocab_size"] = config["vocab_size"]
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]


def normed_before(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Make of a head one with a layer of Qwen3's kind that norms before the residual, as it does if it says nothing."""
    like_qwen3(config, tensors)
    del config["norm_before_residual"]


@pytest.mark.parametrize(("like", "layout"), [(borrowing, "native"), (normed_before, "speculators")])
async def test_heads_of_four_taps_and_of_other_norms_and_layers_draft_alike_and_are_swapped(
    like: Change, layout: str, deep_target: Path, tmp_path: Path
) -> None:
    own, adopted, later, another = folders = [tmp_path / name for name in ("own", "adopted", "later", "another")]
    for folder in folders:
        folder.mkdir()
    counts = np.zeros(259)
    counts[3:67] = 1
    head = eagle3.create(eagle3.Params(vocab_size=64, aux_layers=(0, 1, 3, 4)), deep_target, counts)
    shake(head, 0.02, seed=0)
    eagle3.save(head, own)
    source = published(own, deep_target, tmp_path / "published", layout, like)
    head = eagle3.adopt(source, deep_target)
    eagle3.save(head, adopted)
    output = head.lm_head.weight.detach().clone()
    shake(head, 0.1, seed=1)  # its norms and biases as well
    eagle3.save(head, another)
    head.lm_head.load_state_dict({"weight": output})  # as training leaves it
    eagle3.save(head, later)
    engine = start_as_it_is(deep_target, source)
    try:
        as_published = await answer(engine)
    finally:
        await engine.close()
    engine = await VllmEngine.start(deep_target, adopted, short(dtype="float32"))
    try:
        imported = await answer(engine)
        assert await engine.check_draft(adopted) < 0.05
        await engine.swap_draft(later, "2")
        assert await engine.check_draft(later) < 0.05
        with pytest.raises(ValueError, match="of the loaded draft is off by"):
            await engine.check_draft(adopted)
        swapped = await answer(engine)
        if like is borrowing:
            with pytest.raises(ValueError, match=r"draft uses the target's lm_head.weight, and this one's is another"):
                await engine.swap_draft(another, "3")
    finally:
        await engine.close()
    # Further tokens of vLLM by itself are others, so that both are not at all the same places.
    assert num_alike(imported, as_published) == len(imported) > num_alike(imported, swapped)
    # If it drafts alike by itself, the proposer need not mend this any more.
    assert like is borrowing or num_same(as_published, imported) < len(imported)
    alone = reference.Params(dtype="float32", max_model_len=256)
    for folder, answers in ((adopted, imported), (later, swapped)):
        of_reference = await answer(await reference.TorchEngine.start(deep_target, folder, alone))
        assert num_same(answers, of_reference) >= len(answers) - 1


EPOCHS = 30


def trained_head(target: Path, folder: Path) -> Path:
    """Write a head that has learnt what the target says to the prompts that will be asked."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answered = model.generate(torch.tensor(prompts()), max_new_tokens=32, min_new_tokens=32, do_sample=False).tolist()
    length = len(prompts()[0])
    samples = [Sample(str(number), "d", ids[:length], ids[length:]) for number, ids in enumerate(answered)]
    head = eagle3.create(eagle3.Params(vocab_size=259), target, np.ones(259, int))
    distill.train(head, target, samples, distill.Params(num_epochs=EPOCHS), 3, folder / "work")
    (folder / "draft").mkdir()
    eagle3.save(head, folder / "draft")
    return folder / "draft"


@pytest.mark.parametrize("model_type", ["granite", "olmo2"])  # the second runs as transformers' own model
async def test_a_head_accepts_in_the_engine_what_it_is_scored_to_accept(model_type: str, tmp_path: Path) -> None:
    target = write_family(model_type, tmp_path / "target")
    draft = trained_head(target, tmp_path)
    engine = await VllmEngine.start(target, draft, short(dtype="float32"), draft_version="1")
    try:
        found = await require_swaps(engine, prompts(), 32, draft, draft, 0.02, apart=False)
    finally:
        await engine.close()
    assert num_scored_alike(eagle3.load(draft, target), target, found["first"], tmp_path / "work") >= NUM_SAME
