"""EAGLE-3 heads in the production engine beside targets of other layouts than Llama's, which the reference can't run.

What a head is scored to accept, on the states that transformers gives, vLLM accepts only if it hands out the same
residual streams, and if the head reads tokens there by the same vectors.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import eagle3
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from tests.models.engines.answers import golden_of, num_scored_alike, require_none_different
from tests.models.engines.test_vllm_families import NUM_SAME, answers, prompts
from tests.models.families import write_family

pytestmark = pytest.mark.engine

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


@pytest.mark.parametrize("model_type", ["granite", "phi3", "olmo2"])  # the last one runs as transformers' own model
async def test_a_head_accepts_in_the_engine_what_it_is_scored_to_accept(model_type: str, tmp_path: Path) -> None:
    target = write_family(model_type, tmp_path / "target")
    draft = trained_head(target, tmp_path)
    params = Params(dtype="float32", max_model_len=256, max_num_seqs=16, enforce_eager=True)
    engine = await VllmEngine.start(target, draft, params, draft_version="1")
    try:
        on = await answers(engine, "on")
        await engine.set_speculation(False)
        off = await answers(engine, "off")
        await engine.swap_draft(draft, "2")
        assert await engine.check_draft(draft) < 0.05
    finally:
        await engine.close()
    require_none_different(golden_of(off), on, 0.02)
    assert sum(sum(one.accepted) for one in on) > 0
    assert num_scored_alike(eagle3.load(draft, target), target, on, tmp_path / "work") >= NUM_SAME
