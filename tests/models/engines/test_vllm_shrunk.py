"""A model shrunk in depth and width is one that vLLM serves: it answers as the library's model of the same files."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.core.evaluation.golden import Golden, equal_output
from models.engines import Sampling
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.patches import linear_kernels
from models.params import TrainingParams
from models.shrink import depth, width
from models.targets import random

pytestmark = pytest.mark.engine

GREEDY = Sampling(max_tokens=24, ignore_eos=True, num_logprobs=2)


def test_a_shrunk_model_is_served(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    target, directory = tmp_path / "target", tmp_path / "shrunk"
    random.build(random.Params(num_layers=3, num_heads=4, num_kv_heads=2), target)
    texts, settings = [list(range(3, 60)), list(range(80, 120))], TrainingParams()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = depth.shrink(model, texts, depth.Params(num_layers=2), settings)
    asked = width.Params(num_heads=2, num_kv_heads=1, hidden_size=192, intermediate_size=128)
    model = width.shrink(model, texts, asked, settings)
    model = model.bfloat16()  # as checkpoints are; weights that the engine reads as float16 where that is faster
    model.save_pretrained(directory)
    model = model.float()
    assert all(linear_kernels.fits_half(weight) for weight in model.state_dict().values() if weight.ndim == 2)
    AutoTokenizer.from_pretrained(target).save_pretrained(directory)

    async def answers() -> list[Golden]:
        engine = await VllmEngine.start(directory, None, Params(num_draft_tokens=0, dtype="float32", max_model_len=128))
        try:
            outputs = [await engine.generate(prompt, GREEDY, str(n)) for n, prompt in enumerate(prompts)]
        finally:
            await engine.close()
        return [Golden(prompt_ids=o.prompt_ids, token_ids=o.token_ids, gaps=o.gaps) for o in outputs]

    prompts = [list(range(start, start + 9)) for start in range(3, 123, 15)]
    for golden in loop.run_until_complete(answers()):
        ids = torch.tensor([golden.prompt_ids])
        with torch.inference_mode():
            mine = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert equal_output(golden, mine[0, ids.shape[1] :].tolist(), 0.02) != "different"
