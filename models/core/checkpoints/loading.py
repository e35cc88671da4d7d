"""Target directories as models, and models as target directories."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from models.core.checkpoints import compressed
from models.core.checkpoints.checkpoint import read_stored, read_tensors
from models.core.layers import factors, quantized_weights
from models.targets import target_config

# What is not copied from one target to another that is made of it: the weights, what describes them, what lists files.
_FILE = "model.safetensors"
_OWN = ("config.json", "manifest.json", "golden.json", "model.safetensors.index.json", quantized_weights.FILE)


def load_model(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """Load a target to compute with, rounded inputs included; ValueError if a tensor is missing or can't be read."""
    if _is_plain(directory):
        return moved(_load_plain(directory, dtype), device)
    model = moved(load_floats(directory), dtype)
    compressed.round_inputs(model, read_stored(directory))
    return moved(model, device)


def load_floats(directory: Path) -> PreTrainedModel:
    """Load a target in float32, to be changed or trained, quantized weights and factors as floats; see `load_model`."""
    if _is_plain(directory):
        return _load_plain(directory, torch.float32)
    config = target_config(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _require_all(set(model.load_state_dict(read_tensors(directory), strict=False).missing_keys) - tied, directory)
    model.eval()
    return model


def _is_plain(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_text())
    return "quantization_config" not in config and not config.get("redraft", {}).get("factors")


def _load_plain(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, missing = load_reported(pretrained_model_name_or_path=directory, dtype=dtype)
    _require_all(missing, directory)
    model.eval()
    return model


def load_reported(kind: Any = AutoModelForCausalLM, **settings: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return a model, of a kind of transformers' automatic classes, and which of its tensors the files lack: the
    library draws those at random. `settings` are those of `from_pretrained`."""
    loaded: Any = kind.from_pretrained(output_loading_info=True, **settings)
    model, report = loaded  # which is annotated as the model alone
    return model, sorted(report["missing_keys"])


def write_random(config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, seed: int, directory: Path) -> None:
    """Write a Llama model of random weights in bfloat16, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    moved(model, torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def moved(model: PreTrainedModel, to: torch.dtype | torch.device | str) -> PreTrainedModel:
    """Return the model itself in another number format, or on another device."""
    same: PreTrainedModel = model.to(to)  # type: ignore[arg-type]  # transformers' wrapper asks for the model again
    return same


def _require_all(missing: Collection[str], directory: Path) -> None:
    if missing:
        raise ValueError(f"{directory} has no tensor {min(missing)} ({len(missing)} are missing)")


def save_model(model: PreTrainedModel, directory: Path, like: Path) -> None:
    """Write a model made of the target `like`, in its format and with all else of it, factors included."""
    config = json.loads((like / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    noted = getattr(model.config, "redraft", {})
    if noted.get("factors"):
        parts = factors.split(dict(model.named_parameters()), noted["ranks"])
        save_file({name: part.detach().to(dtype).contiguous().cpu() for name, part in parts.items()}, directory / _FILE)
        model.config.dtype = dtype
        model.config.save_pretrained(directory)
    else:
        moved(model, dtype).save_pretrained(directory)
    complete(directory, like)


def complete(directory: Path, like: Path) -> None:
    """Copy tokenizer, chat template and generation settings of `like` beside new weights."""
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in _OWN:
            shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config.pop("_name_or_path", None)  # a path of this machine
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
