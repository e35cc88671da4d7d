"""Matrices as GGUF files have them, with random integers."""

import torch

from models.core.layers.quantized_weights import GROUP, Grid


def random_grid(outputs: int, inputs: int, bits: int, seed: int = 0) -> Grid:
    """Return one of 4 bits, with least values, or of 8 without."""
    draw = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // GROUP)
    scales = (torch.rand(shape, generator=draw) / 100 + 0.01).half()
    if bits == 8:
        return Grid(torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8), scales / 16)
    values = torch.randint(0, 16, (outputs, inputs), generator=draw).to(torch.uint8)
    return Grid(values, scales, -(torch.rand(shape, generator=draw) / 10 + 0.05).half())
