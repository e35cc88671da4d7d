from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.core.checkpoints.loading import load_model, save_model
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
