import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.core.checkpoints import compressed
from models.core.checkpoints.loading import choose_vocabulary, load_model, read_tensor, read_tensors, save_model
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
