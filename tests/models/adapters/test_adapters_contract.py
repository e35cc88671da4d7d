"""Every adapter: trains only its own, comes back from a small file onto its base alone, and merges to a plain model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import adapters, catalog
from models.adapters import Adapted
from models.core.learning import training
from models.params import TrainingParams
from tests.models.regimes.world import load

METHODS = catalog.names("adapters")
MERGING = [name for name in METHODS if hasattr(catalog.load("adapters", name), "fold")]
TOKEN_IDS = torch.arange(3, 43)[None]
DOCUMENTS = [[3 + (start + 3 * place) % 60 for place in range(20)] for start in range(12)]


def attach(model: PreTrainedModel, name: str) -> Adapted:
    return adapters.attach(model, catalog.load("adapters", name).Params(), torch.Generator().manual_seed(0))


def shaken(model: PreTrainedModel, name: str) -> Adapted:
    """Attach, then move all that is trained away from where it starts."""
    adapted, rng = attach(model, name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.trained.values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=rng)
    return adapted


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKEN_IDS).logits


@pytest.mark.parametrize("name", METHODS)
def test_training_moves_what_is_trained_and_nothing_else(name: str, model: PreTrainedModel) -> None:
    adapted = attach(model, name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = TrainingParams(num_epochs=4, batch_tokens=120, learning_rate=1e-2)
    trained = training.train(model, DOCUMENTS, settings)
    assert trained.losses[-1][1] < trained.losses[0][1] - 0.01
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved == adapted.trained.keys()
    assert adapted.trained_share == sum(before[key].numel() for key in moved) / adapted.num_base


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_adapter_loads_onto_its_base(name: str, tiny_target: Path, tmp_path: Path) -> None:
    adapted, again = shaken(load(tiny_target), name), shaken(load(tiny_target), name)
    assert all(torch.equal(again.trained[key], tensor) for key, tensor in adapted.trained.items())  # by its seed
    assert not torch.allclose(logits(adapted.model), logits(load(tiny_target)))
    adapters.save(adapted, tmp_path)
    num_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert num_bytes < 4 * sum(p.numel() for p in adapted.trained.values()) + 4096 + 128 * len(adapted.trained)
    loaded = adapters.load(load(tiny_target), tmp_path)
    assert torch.equal(logits(loaded.model), logits(adapted.model))
    assert loaded[1:] == adapted[1:]


@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_refuses_another_base_and_leaves_it_alone(name: str, tiny_target: Path, tmp_path: Path) -> None:
    adapters.save(shaken(load(tiny_target), name), tmp_path)
    other = load(tiny_target)
    with torch.no_grad():
        other.model.norm.weight[0] += 0.5
    before = logits(other)
    with pytest.raises(ValueError, match="was made for a base of weights .*, this one's are"):
        adapters.load(other, tmp_path)
    assert torch.equal(logits(other), before)


@pytest.mark.parametrize("name", METHODS)
def test_a_file_of_other_tensors_is_refused(name: str, tiny_target: Path, tmp_path: Path) -> None:
    adapters.save(attach(load(tiny_target), name), tmp_path)
    file = tmp_path / "adapter.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    for fault, wrong in {
        "is missing": {key: tensor for key, tensor in tensors.items() if key != first},
        "is there and not wanted": {**tensors, "more": torch.zeros(1)},
        "all finite": {**tensors, first: torch.full_like(tensors[first], float("nan"))},
        "wanted": {**tensors, first: torch.zeros(3, 1)},
    }.items():
        save_file(wrong, file)
        with pytest.raises(ValueError, match=fault):
            adapters.load(load(tiny_target), tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_has_an_adapter_takes_no_other(name: str, model: PreTrainedModel) -> None:
    attach(model, "lora")
    with pytest.raises(ValueError, match="not a plain LlamaForCausalLM"):
        attach(model, name)


@pytest.mark.parametrize("name", MERGING)
def test_a_merged_model_is_a_plain_one_of_equal_logits(name: str, model: PreTrainedModel, tmp_path: Path) -> None:
    adapted = shaken(model, name)
    before = logits(model)
    merged = adapters.merge(adapted)
    assert torch.allclose(logits(merged), before, atol=1e-5 * float(before.abs().max()), rtol=0)
    merged.save_pretrained(tmp_path)
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(plain), logits(merged))
    assert all(parameter.requires_grad for parameter in merged.parameters())


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(MERGING)))
def test_what_no_plain_model_computes_is_not_merged(name: str, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="can't be merged"):
        adapters.merge(attach(model, name))


def test_the_hash_of_a_base_is_of_its_values_and_not_of_their_format(tiny_target: Path, model: PreTrainedModel) -> None:
    narrow = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16)
    assert adapters.weights_sha256(narrow) == adapters.weights_sha256(model)


def test_a_card_that_says_something_else_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter.json can't be read"):
        adapters.load(load(tiny_target), tmp_path)
    adapters.save(attach(load(tiny_target), METHODS[0]), tmp_path)
    card = json.loads((tmp_path / "adapter.json").read_text())
    for wrong, fault in (([], "must hold"), ({**card, "params": {"name": "lore"}}, 'no method "lore"')):
        (tmp_path / "adapter.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=fault):
            adapters.load(load(tiny_target), tmp_path)
