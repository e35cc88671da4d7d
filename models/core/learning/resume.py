"""What a training loop keeps: checkpoints, so that a killed run goes on exactly where it was, and the state of its end.

The state, safetensors as well, is what another run goes on from: float32 weights, AdamW's moments and its steps. A
draft's own directory has only its weights, rounded to what the engine computes in.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_FILE = "checkpoint.safetensors"


def save_progress(
    work_dir: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    progress: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint in place of the last one, whole or not at all.

    Args:
        work_dir: the run's own folder.
        trained: name to parameter.
        optimizer: of these parameters, after at least one step.
        progress: where the loop is, as JSON; its entry "key" says which run it belongs to.
        extra: name to what else the loop keeps; `load_progress` puts it back.
    """
    tensors = _tensors(trained, optimizer) | {f"extra/{name}": tensor for name, tensor in (extra or {}).items()}
    file = work_dir / _FILE
    save_file(tensors, f"{file}.new", metadata={"progress": json.dumps(progress)})
    os.replace(f"{file}.new", file)


def load_progress(
    work_dir: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    key: str,
    extra: Mapping[str, Tensor] | None = None,
) -> dict[str, Any] | None:
    """Put a checkpoint's weights and optimizer state back.

    Args:
        work_dir: the run's own folder.
        trained: name to parameter, changed in place.
        optimizer: of these parameters.
        key: which run is asked for.
        extra: as it was saved, changed in place.

    Returns:
        the progress that was saved, or None if there is none, or only another run's.
    """
    file = work_dir / _FILE
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as handle:
        progress: dict[str, Any] = json.loads(handle.metadata()["progress"])
    if progress["key"] != key:
        return None
    tensors = load_file(file)
    _restore(tensors, trained, optimizer)
    for name, tensor in (extra or {}).items():
        tensor.copy_(tensors[f"extra/{name}"])
    return progress


def save_state(file: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    """Write what another run goes on from; the optimizer is of these parameters."""
    save_file(_tensors(trained, optimizer), file)


def load_state(file: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    """Put back what `save_state` wrote, in place; ValueError names a parameter that is not of the same shape."""
    tensors = load_file(file)
    saved = {name.removeprefix("weight/"): tensor for name, tensor in tensors.items() if name.startswith("weight/")}
    for name in sorted(saved.keys() | trained.keys()):
        shapes = [None if name not in of else tuple(of[name].shape) for of in (saved, trained)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{file.name}: parameter {name} has shape {shapes[0]}, the draft has {shapes[1]}")
    _restore(tensors, trained, optimizer)


def _tensors(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    tensors = {f"weight/{name}": parameter.detach().contiguous() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        tensors |= {
            f"{key}/{name}": state[key].detach().reshape(-1 if key == "step" else state[key].shape) for key in state
        }
    return tensors


def _restore(tensors: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"weight/{name}"])
            if f"step/{name}" not in tensors:  # no step has given it a gradient yet
                continue
            state = optimizer.state[parameter]
            for part in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"{part}/{name}"].reshape(() if part == "step" else parameter.shape)
                if part in state:  # which lies where somebody wants it
                    state[part].copy_(value)
                else:
                    state[part] = value.to(parameter.device)
