from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import catalog, quantize
from models.core.checkpoints.checkpoint import read_tensor
from models.core.learning.hidden import Sample
from models.drafts import lm
from models.targets import describe
from tests.models.drafts.answered import answers_of, prompts, tau_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def samples(deep_target: Path) -> list[Sample]:
    return answers_of(deep_target, prompts(24))


def test_the_library_loads_what_is_saved(deep_target: Path, tmp_path: Path) -> None:
    draft = lm.create(lm.Params(num_layers=2), deep_target, None)
    lm.save(draft, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    token_ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        mine = draft.lm_head(draft.model(token_ids).last_hidden_state)
        assert torch.allclose(loaded(token_ids).logits, mine, atol=1e-3)


@pytest.mark.parametrize("method", ["int8_dynamic", "rtn"])
def test_a_quantized_target_gives_the_weights_that_it_serves(
    deep_target: Path, samples: list[Sample], tmp_path: Path, method: str
) -> None:
    quantized_dir = tmp_path / "quantized"
    copytree(deep_target, quantized_dir, ignore=ignore_patterns("config.json", "*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(deep_target, dtype=torch.float32)
    module = catalog.load("quantize", method)
    quantize.save(module.quantize(model, [], module.Params()), quantized_dir)
    draft = lm.create(lm.Params(num_layers=3), quantized_dir, None)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[name], read_tensor(quantized_dir, name))
    assert not torch.equal(draft.state_dict()[name], read_tensor(deep_target, name).float())
    # A draft with most of the target's layers is accepted by it, whose states come from its quantized weights.
    assert tau_of(draft, quantized_dir, samples[:4], 3, tmp_path / "states") > 1
    (tmp_path / "draft").mkdir()
    lm.save(draft, tmp_path / "draft")
    lm.check(tmp_path / "draft", None, describe(quantized_dir))


@pytest.mark.parametrize("num_layers", [0, 4, 5])
def test_a_draft_must_be_smaller_than_its_target(deep_target: Path, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 3, less than the target's; got {num_layers}"):
        lm.create(lm.Params(num_layers=num_layers), deep_target, None)
