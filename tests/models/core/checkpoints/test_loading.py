import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.core.checkpoints import compressed
from models.core.checkpoints.loading import (
    choose_vocabulary,
    engine_dtype,
    fast_dtype,
    gpu_name,
    is_out_of_memory,
    load_model,
    read_tensor,
    read_tensors,
    require_device,
    save_model,
)
from models.core.learning import distill
from models.engines.vllm import Params
from models.params import validate
from models.targets import describe


def test_a_saved_model_is_the_target_it_was_in_format_tokenizer_and_weights(tiny_target: Path, tmp_path: Path) -> None:
    model = load_model(tiny_target)
    assert model.dtype == torch.float32
    save_model(model, tmp_path, like=tiny_target)
    assert describe(tmp_path) == describe(tiny_target)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in tiny_target.iterdir()}
    assert str(tiny_target) not in (tmp_path / "config.json").read_text()


def test_a_missing_tensor_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    save_model(load_model(tiny_target), tmp_path, like=tiny_target)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no tensor model.norm.weight \(1 are missing\)"):
        load_model(tmp_path)


def write(directory: Path, method: str) -> None:
    scheme = compressed.plain_scheme(compressed.INTEGER, dynamic=True) | {"quant_method": method}
    (directory / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    tensors = {
        "layer.weight": torch.tensor([[3, -4]], dtype=torch.int8),
        "layer.weight_scale": torch.tensor([[0.5]]),
        "norm.weight": torch.ones(2),
    }
    save_file(tensors, directory / "model.safetensors")


def test_quantized_weights_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    write(tmp_path, "compressed-tensors")
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == {"layer.weight", "norm.weight"}
    assert tensors["layer.weight"].tolist() == read_tensor(tmp_path, "layer.weight").tolist() == [[1.5, -2.0]]
    assert read_tensor(tmp_path, "norm.weight").tolist() == [1.0, 1.0]


def test_another_quantization_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    with pytest.raises(ValueError, match="weights quantized by 'gptq' can't be read; compressed-tensors can"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("weights", {"num_bits": 8, "strategy": "tensor", "symmetric": True}, "can't be read"),
        ("weights", {"num_bits": 8, "strategy": "channel", "symmetric": False}, "can't be read"),
        ("input_activations", None, "format 'int-quantized' .* inputs None can't be read"),
    ],
)
def test_what_the_format_can_say_and_is_unread_is_refused(tmp_path: Path, key: str, value: object, fault: str) -> None:
    write(tmp_path, "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=fault):
        read_tensors(tmp_path)


def test_the_vocabulary_is_the_most_frequent_tokens_in_ascending_order_and_of_equals_the_smaller_ids() -> None:
    assert choose_vocabulary(np.array([1, 9, 0, 9, 3]), 3).tolist() == [1, 3, 4]
    assert choose_vocabulary(np.array([0, 2, 0, 0]), 3).tolist() == [0, 1, 2]


def test_the_engines_number_format_is_told_by_name() -> None:
    assert engine_dtype(Params(dtype="bfloat16"), "cpu") == "bfloat16"
    assert engine_dtype(Params(), "cpu") in ("float32", "bfloat16")


def test_a_device_that_is_not_here_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    require_device("cpu")
    with pytest.raises(ValueError, match="^device cuda is not here; torch sees cpu$"):
        require_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        require_device(device)
    with pytest.raises(ValueError, match="^device cuda:2 is not here; torch sees cpu, cuda:0, cuda:1$"):
        require_device("cuda:2")


def test_a_recipe_names_one_of_several_gpus_and_nothing_else() -> None:
    assert distill.Params().device == ""
    assert distill.Params(device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="device"):
        validate(distill.Params, {"device": "gpu1"}, "distill")


def test_one_of_several_gpus_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert fast_dtype("cuda:1") == torch.bfloat16
    assert (gpu_name("cuda:1"), gpu_name("cpu")) == ("name of cuda:1", "")


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert is_out_of_memory(error) is ran_out
