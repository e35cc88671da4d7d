import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models.core.checkpoints import compressed
from models.core.checkpoints.checkpoint import choose_vocabulary, read_tensor, read_tensors


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
