"""Matrices as GGUF files have them, with random integers, and a target of such."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.core.layers import quantized_weights
from models.core.layers.quantized_weights import GROUP, Grid
from models.targets import random


def random_grid(outputs: int, inputs: int, bits: int, seed: int = 0) -> Grid:
    """Return one of 4 bits, with least values, or of 8 without."""
    draw = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // GROUP)
    scales = (torch.rand(shape, generator=draw) / 100 + 0.01).half()
    if bits == 8:
        return Grid(torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8), scales / 16)
    values = torch.randint(0, 16, (outputs, inputs), generator=draw).to(torch.uint8)
    return Grid(values, scales, -(torch.rand(shape, generator=draw) / 10 + 0.05).half())


def build_on_grids(directory: Path) -> None:
    """Write a random target whose matrices lie on grids."""
    random.build(random.Params(), directory)
    file = directory / "model.safetensors"
    weights, found = load_file(file), {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            found[name] = quantized_weights.rounded(weight)
            weights[name] = found[name].floats().to(weight.dtype)
    save_file(weights, file, {"format": "pt"})
    quantized_weights.save(found, directory)
