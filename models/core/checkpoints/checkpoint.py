"""Model directories: single tensors, and whole files with an error that says what is wrong with them.

Quantized weights, and factors of those of low rank, are read as the floats that they stand for.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from models.core.checkpoints import compressed
from models.core.layers import factors


def read_tensor(directory: Path, name: str) -> Tensor:
    """Read one tensor of a model directory, single-file or sharded; ValueError if no file holds it."""
    layer = name.rpartition(".")[0]
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if key.rpartition(".")[0] == layer:
                    found[key] = tensors.get_tensor(key)
    found = factors.join(_restored(found, directory))
    if name not in found:
        raise ValueError(f"no tensor {name} in {directory}")
    return found[name]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory; ValueError if there are none, or one can't be read or restored."""
    return factors.join(read_parts(directory))


def read_parts(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory, those of low rank as they are stored; ValueError as `read_tensors`."""
    return _restored(read_stored(directory), directory)


def _restored(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    scheme = quantization(directory)
    return compressed.restore(tensors, scheme) if scheme else tensors


def quantization(directory: Path) -> dict[str, Any] | None:
    """Return how config.json says that weights are quantized, or None for plain ones."""
    file = directory / "config.json"
    found: dict[str, Any] | None = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    return found


def read_stored(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory as they are stored; ValueError as `read_tensors`."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.safetensors of {directory.name} can't be read: there is no safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except OSError as error:
            raise ValueError(f"{file.name} of {directory.name} can't be read: {error}") from error
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{file.name} of {directory.name} is not a safetensors file: {error}") from error
    return tensors


def tensor_names(file: Path) -> list[str]:
    """Return the names of a safetensors file's tensors; ValueError if it can't be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file.name} of {file.parent.name} is not a safetensors file: {error}") from error


def choose_vocabulary(token_counts: np.ndarray, size: int) -> Tensor:
    """Return the `size` most frequent target ids, ascending; ties go to the smaller id, the more common token."""
    return torch.from_numpy(np.sort(np.argsort(-np.asarray(token_counts), kind="stable")[:size]).astype(np.int64))
