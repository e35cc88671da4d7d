from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import catalog, quantize
from models.checkpoints.checkpoint import read_tensor
from models.drafts import lm
from models.evaluation.scoring import score
from models.learning import distill
from models.learning.hidden import Sample
from models.targets import describe, random

pytestmark = pytest.mark.slow

TINY = {"num_layers": 1}
REFUSED = {"num_layers": 3, "nested": (1, 2)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    random.build(random.Params(num_layers=4), directory)
    return directory


@pytest.fixture(scope="module")
def samples(target: Path) -> list[Sample]:
    """Greedy answers of the target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    made = []
    for number in range(24):
        prompt = torch.randint(3, 67, (1, 8), generator=torch.Generator().manual_seed(number))
        with torch.inference_mode():
            ids = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        made.append(Sample(str(number), "d", prompt[0].tolist(), ids[0, 8:].tolist()))
    return made


def tau(draft: lm.Lm, target: Path, samples: list[Sample], work: Path) -> float:
    scores = score(draft, target, samples, 3, work)
    return 1 + sum(s.accepted for s in scores) / sum(s.steps for s in scores)


def test_layers_are_spread_from_the_first_to_the_last(target: Path) -> None:
    draft = lm.create(lm.Params(num_layers=2), target, None)
    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for kept, number in zip(draft.model.layers, (0, 3), strict=True):
        assert torch.equal(kept.mlp.up_proj.weight, whole.model.layers[number].mlp.up_proj.weight)


def test_distillation_raises_acceptance_and_leaves_the_embedding(
    target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    draft = lm.create(lm.Params(num_layers=2), target, None)
    before, embedding = tau(draft, target, samples, tmp_path), draft.lm_head.weight.clone()
    params = distill.Params(num_epochs=20, batch_tokens=256, learning_rate=2e-3, num_threads=1)
    distill.train(draft, target, samples, params, 3, tmp_path)
    assert tau(draft, target, samples, tmp_path) > before + 0.15
    assert torch.equal(draft.lm_head.weight, embedding)


def test_the_library_loads_what_is_saved(target: Path, tmp_path: Path) -> None:
    draft = lm.create(lm.Params(num_layers=2), target, None)
    lm.save(draft, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    token_ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        mine = draft.lm_head(draft.model(token_ids).last_hidden_state)
        assert torch.allclose(loaded(token_ids).logits, mine, atol=1e-3)


@pytest.mark.parametrize("method", ["int8_dynamic", "rtn"])
def test_a_quantized_target_gives_the_weights_that_it_serves(
    target: Path, samples: list[Sample], tmp_path: Path, method: str
) -> None:
    quantized_dir = tmp_path / "quantized"
    copytree(target, quantized_dir, ignore=ignore_patterns("config.json", "*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    module = catalog.load("quantize", method)
    quantize.save(module.quantize(model, [], module.Params()), quantized_dir)
    draft = lm.create(lm.Params(num_layers=3), quantized_dir, None)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[name], read_tensor(quantized_dir, name))
    assert not torch.equal(draft.state_dict()[name], read_tensor(target, name).float())
    # A draft with most of the target's layers is accepted by it, whose states come from its quantized weights.
    assert tau(draft, quantized_dir, samples[:4], tmp_path / "states") > 1
    (tmp_path / "draft").mkdir()
    lm.save(draft, tmp_path / "draft")
    lm.check(tmp_path / "draft", None, describe(quantized_dir))


@pytest.mark.parametrize("num_layers", [0, 4, 5])
def test_a_draft_must_be_smaller_than_its_target(target: Path, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 3, less than the target's; got {num_layers}"):
        lm.create(lm.Params(num_layers=num_layers), target, None)
