"""Quantized and shrunk checkpoints in the production engine: it says what the simulation, or the library, says."""

from collections.abc import Sequence
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models import quantize
from models.core.checkpoints import mixed
from models.core.evaluation.golden import equal_output
from models.engines import Completion, Sampling
from models.engines.vllm.patches import linear_kernels
from models.params import TrainingParams
from models.shrink import depth, width
from models.stages import Quantize
from models.targets import describe, random
from tests.models.engines.answers import answer_all, golden_of
from tests.models.engines.started import Loop, running

pytestmark = pytest.mark.engine

GREEDY = Sampling(max_tokens=12, ignore_eos=True, num_logprobs=2)
# One of each form that is stored, in 7 bits because some processors multiply 8 wrongly; what the engine computes in;
# and how far from the simulation it may be, as a share of what quantizing changed: bfloat16 rounds every step.
EXCEPTIONS = {"*.down_proj": {"name": "int8_dynamic", "weight_bits": 7}, "model.layers.0.self_attn.*": "float"}
CASES: list[tuple[dict[str, object], str, float]] = [
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


def gaps(model: PreTrainedModel, answers: Sequence[Completion]) -> np.ndarray:
    """How far the engine's token is ahead of the best other one in `model`, [answers, tokens]; negative if behind."""
    ids = torch.tensor([answer.prompt_ids + answer.token_ids for answer in answers])
    logits = model(ids).logits[:, len(answers[0].prompt_ids) - 1 : -1]
    said = ids[:, len(answers[0].prompt_ids) :, None]
    others = logits.scatter(2, said, -torch.inf).amax(-1)
    return (logits.gather(2, said)[..., 0] - others).detach().numpy()


@pytest.mark.parametrize(("table", "dtype", "allowed"), CASES, ids=[f"{t['name']}-{dtype}" for t, dtype, _ in CASES])
def test_the_engine_says_what_the_simulation_says(
    table: dict[str, object], dtype: str, allowed: float, tiny_target: Path, tmp_path: Path, loop: Loop
) -> None:
    simulation = store(table, tiny_target, tmp_path / "quantized")
    with running(loop, tmp_path / "quantized", None, dtype=dtype) as engine:
        answers = loop.run_until_complete(answer_all(engine, prompts(8, 16), GREEDY, 1, "quantized"))
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


def test_a_shrunk_model_is_served(loop: Loop, tmp_path: Path) -> None:
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

    prompts = [list(range(start, start + 9)) for start in range(3, 123, 15)]
    with running(loop, directory, None, num_draft_tokens=0, dtype="float32") as engine:
        answers = loop.run_until_complete(answer_all(engine, prompts, GREEDY, 1, "shrunk"))
    for golden in golden_of(answers):
        ids = torch.tensor([golden.prompt_ids])
        with torch.inference_mode():
            mine = model.generate(
                ids, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert equal_output(golden, mine[0, ids.shape[1] :].tolist(), 0.02) != "different"
