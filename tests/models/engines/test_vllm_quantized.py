"""Quantized checkpoints in the production engine: it says what the simulation says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import quantize
from models.core.checkpoints import mixed
from models.engines import Completion, Sampling
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.stages import Quantize
from models.targets import describe

pytestmark = pytest.mark.engine

GREEDY = Sampling(max_tokens=12, ignore_eos=True, num_logprobs=2)
# One of each form that is stored, in 7 bits because some processors multiply 8 wrongly; what the engine computes in;
# and how far from the simulation it may be, as a share of what quantizing changed: bfloat16 rounds every step.
EXCEPTIONS = {"*.down_proj": {"name": "int8_dynamic", "weight_bits": 7}, "model.layers.0.self_attn.*": "float"}
CASES: list[tuple[dict[str, object], Literal["float32", "bfloat16"], float]] = [
    ({"name": "int8_dynamic", "weight_bits": 7}, "float32", 0.05),
    ({"name": "int8_static", "weight_bits": 7, "exceptions": EXCEPTIONS}, "float32", 0.05),
    ({"name": "gptq", "group_size": 64}, "float32", 0.05),
    ({"name": "awq", "group_size": 32}, "float32", 0.05),  # with zero points
    ({"name": "awq", "group_size": 32}, "bfloat16", 0.5),
]


def prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 259, size=(count, length)).tolist()


def store(table: dict[str, object], target: Path, directory: Path) -> PreTrainedModel:
    """Quantize `target` into `directory`; return the simulation."""
    copytree(target, directory, ignore=ignore_patterns("config.json", "*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    method = {key: value for key, value in table.items() if key != "exceptions"}
    stage = Quantize.model_validate({"method": method, "exceptions": table.get("exceptions", {})})
    quantized = mixed.quantize(model, prompts(4, 64), stage.method, stage.exceptions)
    quantize.save(quantized, directory)
    return quantized.model


async def answer_and_close(target: Path, dtype: Literal["float32", "bfloat16"]) -> list[Completion]:
    params = Params(dtype=dtype, max_model_len=128, max_num_seqs=8)
    engine = await VllmEngine.start(target, None, params)
    try:
        return [await engine.generate(prompt, GREEDY, f"{n}") for n, prompt in enumerate(prompts(8, 16))]
    finally:
        await engine.close()


def gaps(model: PreTrainedModel, answers: Sequence[Completion]) -> np.ndarray:
    """How far the engine's token is ahead of the best other one in `model`, [answers, tokens]; negative if behind."""
    ids = torch.tensor([answer.prompt_ids + answer.token_ids for answer in answers])
    logits = model(ids).logits[:, len(answers[0].prompt_ids) - 1 : -1]
    said = ids[:, len(answers[0].prompt_ids) :, None]
    others = logits.scatter(2, said, -torch.inf).amax(-1)
    return (logits.gather(2, said)[..., 0] - others).detach().numpy()


@pytest.mark.parametrize(("table", "dtype", "allowed"), CASES, ids=[f"{t['name']}-{dtype}" for t, dtype, _ in CASES])
def test_the_engine_says_what_the_simulation_says(
    table: dict[str, object],
    dtype: Literal["float32", "bfloat16"],
    allowed: float,
    tiny_target: Path,
    tmp_path: Path,
    loop: asyncio.AbstractEventLoop,
) -> None:
    simulation = store(table, tiny_target, tmp_path / "quantized")
    answers = loop.run_until_complete(answer_and_close(tmp_path / "quantized", dtype))
    served = np.array([answer.gaps for answer in answers])
    assert served.shape == (8, GREEDY.max_tokens)
    float_model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    simulated, unquantized = gaps(simulation, answers), gaps(float_model, answers)
    # Where a number lies between two integers the last bit of a sum decides, and all that follows moves a little: so
    # most places agree to many digits and a few don't.
    assert np.median(np.abs(simulated - served)) < allowed * np.median(np.abs(unquantized - served))
    assert simulated.min() > -0.2
    card, plain = describe(tmp_path / "quantized"), describe(tiny_target)
    assert card.sha256 != plain.sha256 and card.tokenizer_sha256 == plain.tokenizer_sha256
