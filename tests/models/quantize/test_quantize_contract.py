"""What every quantization method keeps to: sizes are real, files say what was computed, bad input is refused."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from models import catalog, quantize
from models.core.checkpoints.loading import load_model, read_tensor, read_tensors
from models.core.layers.linears import linears
from models.params import BaseParams, TrainingParams
from models.quantize import Quantized
from tests.models.regimes.world import built, load

NAMES = catalog.names("quantize")
STORED = [name for name in NAMES if catalog.load("quantize", name).STORED]
TRAINED = [name for name in NAMES if hasattr(catalog.load("quantize", name), "Hooks")]
GROUPED = [name for name in NAMES if "group_size" in catalog.load("quantize", name).Params.model_fields]
DOCUMENTS = torch.randint(3, 259, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
IDS = torch.tensor(DOCUMENTS[:2])

Made = Callable[[str], Quantized]


def method(name: str, **settings: Any) -> tuple[ModuleType, BaseParams]:
    return catalog.load("quantize", name), catalog.parse("quantize", {"name": name, **settings})


def run(name: str, model: PreTrainedModel, documents: list[list[int]] = DOCUMENTS, **settings: Any) -> Quantized:
    module, params = method(name, **settings)
    return module.quantize(model, documents, params)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def made(tiny_target: Path) -> Made:
    """Return what quantizes the target by a method, once."""
    return cache(lambda name: run(name, load(tiny_target)))


@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_model_is_smaller_and_still_a_model(name: str, made: Made, tiny_target: Path) -> None:
    quantized = made(name)
    in_16_bits = 2 * sum(parameter.numel() for parameter in load(tiny_target).parameters())
    assert quantized.num_bytes < in_16_bits or "kv_bytes_per_token" in quantized.figures
    assert logits(quantized.model).isfinite().all()
    assert not any(parameter.requires_grad for parameter in quantized.model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_twice_gives_the_same_file(name: str, made: Made, tiny_target: Path) -> None:
    once, twice = made(name).tensors, run(name, load(tiny_target)).tensors
    assert once.keys() == twice.keys()
    for key, tensor in once.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), twice[key].flatten().view(torch.uint8)), key


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_quantized_is_what_its_16_bits_say(name: str, made: Made) -> None:
    quantized = made(name)
    for key, parameter in quantized.model.named_parameters():
        if key in quantized.tensors and quantized.tensors[key].dtype == torch.bfloat16:
            assert torch.equal(parameter, quantized.tensors[key].float()), key
    assert quantized.tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", STORED)
def test_a_stored_file_is_read_by_us_and_by_transformers_as_the_weights_that_were_computed_with(
    name: str, made: Made, tiny_target: Path, tmp_path: Path
) -> None:
    quantized, ours = made(name), load(tiny_target)
    quantize.save(quantized, tmp_path)
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == {key for key, _ in ours.named_parameters()}
    ours.load_state_dict(tensors, strict=False)
    theirs = load(tmp_path)
    logits(theirs)  # packed weights are unpacked by the first pass
    for layer, module in linears(ours):
        assert torch.equal(theirs.get_submodule(layer).weight.float(), module.weight), layer
    first = next(key for key, _ in linears(ours))
    assert torch.equal(read_tensor(tmp_path, f"{first}.weight"), tensors[f"{first}.weight"])
    assert torch.equal(logits(load_model(tmp_path)), logits(quantized.model))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(STORED)))
def test_a_form_that_no_engine_reads_is_not_saved(name: str, made: Made, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no engine reads this quantized form; those of these methods are: .*gptq"):
        quantize.save(made(name), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_calibration_is_read_by_those_that_say_so(name: str, made: Made, tiny_target: Path) -> None:
    if catalog.load("quantize", name).CALIBRATED:
        for short in ([], [[5]], [list(range(3, 30))] * 2):
            with pytest.raises(ValueError, match=r"calibration takes 128 tokens or more; got \d+"):
                run(name, load(tiny_target), short)
    else:
        assert run(name, load(tiny_target), []).num_bytes == made(name).num_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_cannot_be_handled_is_named(name: str, model: PreTrainedModel, tiny_target: Path) -> None:
    model.model.layers[1].mlp.up_proj = nn.Bilinear(8, 8, 8)
    with pytest.raises(ValueError, match=r"layer model\.layers\.1\.mlp\.up_proj is a Bilinear"):
        run(name, model)
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.self_attn\.q_proj is in torch\.bfloat16"):
        run(name, load(tiny_target).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_biases_stay_in_the_model_and_in_the_file(name: str) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 259, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1)).float()
    with torch.no_grad():
        for projection in "qkv":
            model.get_submodule(f"model.layers.0.self_attn.{projection}_proj").bias.normal_()
    without = copy.deepcopy(model)
    without.model.layers[0].self_attn.v_proj.bias.data.zero_()
    exact, lost = logits(model), logits(without)
    quantized = run(name, model)
    assert quantized.tensors["model.layers.0.self_attn.v_proj.bias"].shape == (64,)
    if name not in TRAINED:
        assert (logits(quantized.model) - exact).norm() < 0.5 * (lost - exact).norm()


@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_do_not_fill_a_row_are_refused(name: str, tmp_path: Path) -> None:
    odd = built(tmp_path, num_heads=3, num_layers=1)
    with pytest.raises(ValueError, match=r"group_size 128 does not divide the width 192 of layer model\.layers\.0"):
        run(name, odd, group_size=128)


@pytest.mark.parametrize("name", TRAINED)
def test_training_for_a_form_computes_as_the_form_does_and_learns(name: str, tiny_target: Path) -> None:
    module, params = method(name)
    model, plain = load(tiny_target), load(tiny_target)
    for parameter in model.parameters():  # so that what stays in 16 bits is equal
        parameter.data.copy_(parameter.data.bfloat16())
    regime = module.Hooks(params, torch.Generator())
    regime.start(model, None)
    trained_on = logits(model)
    regime.finish(model)
    assert torch.equal(logits(model), logits(plain))
    quantized = module.quantize(model, [], params)
    assert torch.allclose(trained_on, logits(quantized.model), atol=2e-4, rtol=1e-4)
    counting = [[3 + (start + 3 * place) % 60 for place in range(20)] for start in range(16)]
    settings = TrainingParams(num_epochs=12, batch_tokens=128, learning_rate=3e-3)
    trained = quantize.train_for(params, plain, counting, settings)
    assert trained is not None and trained.losses[-1][1] < 0.5 * trained.losses[0][1]


def test_methods_without_a_regime_are_not_trained_for(tiny_target: Path) -> None:
    for name in set(NAMES) - set(TRAINED):
        assert quantize.train_for(method(name)[1], load(tiny_target), DOCUMENTS, TrainingParams()) is None
