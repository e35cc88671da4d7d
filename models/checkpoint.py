"""Model directories: single tensors, and whole files with an error that says what is wrong with them.

Quantized weights are read as the floats that they stand for.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models import compressed


def read_tensor(directory: Path, name: str) -> Tensor:
    """Read one tensor of a model directory, single-file or sharded.

    Raises:
        ValueError: no file holds it.
    """
    layer, quantization = name.rpartition(".")[0], _quantization(directory)
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if key == name or (quantization and key.rpartition(".")[0] == layer):
                    found[key] = tensors.get_tensor(key)
    if quantization:
        found = compressed.restore(found, quantization)
    if name not in found:
        raise ValueError(f"no tensor {name} in {directory}")
    return found[name]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory.

    Raises:
        ValueError: there is no file, one can't be read, or weights are quantized in a way that can't be.
    """
    tensors, quantization = _read_stored(directory), _quantization(directory)
    return compressed.restore(tensors, quantization) if quantization else tensors


def load_floats(directory: Path) -> PreTrainedModel:
    """Load a causal language model in float32, to be changed or trained.

    Raises:
        ValueError: it is quantized in a way that can't be read, or a tensor is missing.
    """
    if _quantization(directory) is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, _ = model.load_state_dict(read_tensors(directory), strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(missing) - tied):
        raise ValueError(f"no tensor {missing[0]} in {directory} ({len(missing)} are missing)")
    return model.eval()


def load_served(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model that computes as an engine does that serves it, rounded inputs included.

    Raises:
        ValueError: as `load_floats`.
    """
    if _quantization(directory) is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    model = load_floats(directory).to(dtype)
    compressed.round_inputs(model, _read_stored(directory))
    return model


def output_embedding(directory: Path) -> Tensor:
    """[V, H] a model's output matrix, which may be its input embedding, in float32."""
    config = AutoConfig.from_pretrained(directory)
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return read_tensor(directory, name).float()


def _quantization(directory: Path) -> dict[str, Any] | None:
    """Return how config.json says that weights are quantized, or None for plain ones."""
    file = directory / "config.json"
    found: dict[str, Any] | None = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    return found


def _read_stored(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.safetensors of {directory.name} can't be read: there is no safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file.name} of {directory.name} can't be read: {error}") from error
        except SafetensorError as error:
            raise ValueError(f"{file.name} of {directory.name} is not a safetensors file: {error}") from error
    return tensors
