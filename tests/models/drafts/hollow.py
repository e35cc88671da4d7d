"""A target of which some sublayers add nothing, so that a draft without them says what it says."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.core.layers.decoder import Sublayers
from models.targets import random


def make_hollow(directory: Path, num_layers: int, attention: set[int], mlp: set[int]) -> Sublayers:
    """Write a random target whose named sublayers have an output matrix of zeroes, and return these."""
    random.build(random.Params(num_layers=num_layers), directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    outputs = [f"model.layers.{number}.self_attn.o_proj.weight" for number in attention]
    for name in outputs + [f"model.layers.{number}.mlp.down_proj.weight" for number in mlp]:
        tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return Sublayers(frozenset(attention), frozenset(mlp))
