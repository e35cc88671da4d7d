"""What every shrinking method keeps: the model it was given, a loadable checkpoint, and fewer weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from models import catalog
from models.params import TrainingParams
from models.shrink import num_parameters
from tests.models.regimes.world import built

SMALL = {
    "depth": {"num_layers": 2},
    "width": {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 128, "intermediate_size": 96},
    "sheared": {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 128, "intermediate_size": 96},
    "vocabulary": {"vocab_size": 100},
    "low_rank": {"share": 0.5},
}
UNSHAPED = {"sheared": {"min_mask_steps": 1}}  # what says nothing of the shape
METHODS = catalog.names("shrink")
TRAINING = TrainingParams(max_length=32, batch_tokens=128)


def documents(count: int = 16) -> list[list[int]]:
    return torch.randint(3, 90, (count, 24), generator=torch.Generator().manual_seed(0)).tolist()


def shrink(name: str, model: PreTrainedModel, texts: list[list[int]], seed: int = 0) -> PreTrainedModel:
    method = catalog.load("shrink", name)
    return method.shrink(model, texts, method.Params(**SMALL.get(name, {}), **UNSHAPED.get(name, {})), TRAINING, seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return built(tmp_path_factory.mktemp("target"), num_layers=3, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def shrunk(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = {name: shrink(name, model, documents()) for name in METHODS}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.num_hidden_layers == 3 and not hasattr(model.config, "redraft")
    return made


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 20)[None], use_cache=False).logits


@pytest.mark.parametrize("name", METHODS)
def test_what_is_saved_is_what_the_library_loads(name: str, shrunk: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    shrunk[name].save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(loaded), logits(shrunk[name]))
    assert num_parameters(loaded) == num_parameters(shrunk[name])


@pytest.mark.parametrize("name", METHODS)
def test_it_is_smaller_and_its_config_says_its_shape(name, model, shrunk) -> None:
    assert num_parameters(shrunk[name]) < num_parameters(model)
    config, made = shrunk[name].config, shrunk[name].model
    assert [block.self_attn.layer_idx for block in made.layers] == list(range(config.num_hidden_layers))
    assert made.embed_tokens.weight.shape == (config.vocab_size, config.hidden_size)
    assert shrunk[name].lm_head.weight is made.embed_tokens.weight
    for block in made.layers:
        assert block.self_attn.q_proj.weight.shape == (64 * config.num_attention_heads, config.hidden_size)
        assert block.self_attn.v_proj.weight.shape == (64 * config.num_key_value_heads, config.hidden_size)
        assert block.mlp.down_proj.weight.shape == (config.hidden_size, config.intermediate_size)
    assert config.head_dim == 64 and not shrunk[name].training
    asked = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    asked |= {"num_kv_heads": "num_key_value_heads"}
    for key, value in SMALL.get(name, {}).items():
        assert key == "share" or getattr(config, asked.get(key, key)) == value


@pytest.mark.parametrize("name", METHODS)
def test_it_reads_token_by_token_as_it_reads_all_at_once(name: str, shrunk: dict[str, PreTrainedModel]) -> None:
    token_ids, cache, rows = torch.arange(3, 20)[None], None, []
    with torch.no_grad():
        for place in range(token_ids.shape[1]):
            output = shrunk[name](token_ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache, rows = output.past_key_values, [*rows, output.logits]
    torch.testing.assert_close(torch.cat(rows, dim=1), logits(shrunk[name]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_a_seed_gives_the_same_model_again(name, model, shrunk) -> None:
    again = shrink(name, model, documents())
    assert all(torch.equal(tensor, shrunk[name].state_dict()[key]) for key, tensor in again.state_dict().items())


@pytest.mark.parametrize("name", METHODS)
def test_a_model_of_another_layout_is_refused(name: str) -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=259))
    with pytest.raises(ValueError, match="shrinking takes models of llama, .*; got gpt2"):
        shrink(name, other, documents())


@pytest.mark.parametrize("name", METHODS)
def test_no_documents_are_refused(name: str, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="documents"):
        shrink(name, model, [])
