"""Targets from a directory, and the one line about a directory that holds none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from models.targets import describe
from models.targets.pretrained import Params, build


def test_a_local_directory_becomes_a_target_of_the_same_weights_and_tokens(tiny_target: Path, tmp_path: Path) -> None:
    build(Params(path=str(tiny_target)), tmp_path)
    found, wanted = describe(tmp_path), describe(tiny_target)
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (wanted.vocab_size, wanted.hidden_size, 2)
    assert (found.sha256, found.tokenizer_sha256) == (wanted.sha256, wanted.tokenizer_sha256)


def without(*names: str) -> Callable[[Path], object]:
    return lambda copy: [(copy / name).unlink() for name in names]


def without_tensor(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def with_config(**changed: object) -> Callable[[Path], object]:
    def change(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **changed}))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (without("config.json"), "is not a Hugging Face model directory: it has no config.json"),
        (without("model.safetensors"), "is not a Hugging Face model directory: it has no safetensors weights"),
        (without("tokenizer.json"), r"is not .*: it has no tokenizer \(tokenizer.json, tokenizer.model"),
        (lambda copy: (copy / "config.json").write_text("{"), "can't be loaded: .*config.json"),
        (with_config(model_type="nobody"), "can't be loaded: .*nobody"),
        (with_config(model_type="t5"), "can't be loaded: "),
        (lambda copy: (copy / "model.safetensors").write_bytes(b"junk"), "can't be loaded: "),
        (without_tensor, r"has no tensor model.layers.1.mlp.up_proj.weight \(1 are missing\)"),
        (shutil.rmtree, "is not a directory"),
    ],
)
def test_a_directory_that_holds_no_model_is_refused_in_one_line(
    tiny_target: Path, tmp_path: Path, spoil: Callable[[Path], object], fault: str
) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(tiny_target, copy)
    spoil(copy)
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match=f"target '{copy}' {fault}") as error:
        build(Params(path=str(copy)), tmp_path / "made")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "made").iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="target 'nobody/nothing' is neither a local directory nor on a hub in reach"):
        build(Params(path="nobody/nothing"), tmp_path)
