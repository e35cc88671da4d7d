"""What a training loop keeps, so that a killed run goes on exactly where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

_FILE = "checkpoint.safetensors"


def save_progress(
    work_dir: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, progress: Mapping[str, Any]
) -> None:
    """Write a checkpoint in place of the last one, whole or not at all.

    Args:
        work_dir: the run's own folder.
        trained: name to parameter.
        optimizer: of these parameters, after at least one step.
        progress: where the loop is, as JSON; its entry "key" says which run it belongs to.
    """
    tensors = {f"weight/{name}": parameter.detach().contiguous() for name, parameter in trained.items()}
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        tensors |= {
            f"{key}/{name}": state[key].detach().reshape(-1 if key == "step" else state[key].shape) for key in state
        }
    file = work_dir / _FILE
    save_file(tensors, f"{file}.new", metadata={"progress": json.dumps(progress)})
    os.replace(f"{file}.new", file)


def load_progress(
    work_dir: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, key: str
) -> dict[str, Any] | None:
    """Put a checkpoint's weights and optimizer state back.

    Args:
        work_dir: the run's own folder.
        trained: name to parameter, changed in place.
        optimizer: of these parameters.
        key: which run is asked for.

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
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"weight/{name}"])
            if f"step/{name}" not in tensors:  # no step has given it a gradient yet
                continue
            optimizer.state[parameter] = {
                part: tensors[f"{part}/{name}"].reshape(() if part == "step" else parameter.shape).to(parameter.device)
                for part in ("step", "exp_avg", "exp_avg_sq")
            }
    return progress
