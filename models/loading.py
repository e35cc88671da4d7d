"""Target directories as models, and models as target directories."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# What is not copied from one target to another that is made of it: the weights, what describes them, what lists files.
_OWN = ("config.json", "manifest.json", "golden.json", "model.safetensors.index.json")


def load_model(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """Load a target to compute with.

    A quantized one comes as transformers runs it: its weights as the floats that they stand for, and where the engine
    rounds activations, they are rounded here too.

    Raises:
        ValueError: a tensor is missing, which the library would have drawn at random.
    """
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{directory} has no tensor {missing[0]} ({len(missing)} are missing)")
    if getattr(model.config, "quantization_config", None) is not None:
        # Weights are unpacked in the whole model's first forward pass, and not when the decoder runs by itself.
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    return model.eval().to(device)


def save_model(model: PreTrainedModel, directory: Path, like: Path) -> None:
    """Write a model that was made of the target `like` into `directory`, in the same number format.

    Args:
        model: of another shape or other weights; its own format is changed.
        directory: gets config and weights, and all else from `like`.
        like: a target's directory.
    """
    config = json.loads((like / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    model.to(dtype).save_pretrained(directory)
    complete(directory, like)


def complete(directory: Path, like: Path) -> None:
    """Copy tokenizer, chat template and generation settings of `like` beside new weights."""
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in _OWN:
            shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config.pop("_name_or_path", None)  # a path of this machine
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
