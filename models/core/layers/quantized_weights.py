"""Weights on the grid that a file had them on, kept beside a target's floats.

A GGUF file has integers of few bits for a matrix, and a scale for each 32 of a row (Q8_0), or a scale and a least value
(Q4_1): w = scale · integer + least. A target made of it is served in floats, which take four times the memory to read.
What is kept here says the same weights in as few bits as the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Not *.safetensors: whoever loads a target takes those for its weights.
FILE = "weights.grid"
GROUP = 32


class Grid(NamedTuple):
    """A matrix with O outputs and I inputs: [O, I] integers, and [O, I / 32] scales and least values in float16.

    Integers are uint8 from 0 to 15 where there are least values, what 0 stands for; else int8.
    """

    values: Tensor
    scales: Tensor
    least: Tensor | None = None

    def floats(self) -> Tensor:
        """Return the weights, [O, I] float32."""
        groups: Tensor = self.values.float().unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        return (groups if self.least is None else groups + self.least.float()[..., None]).flatten(1)

    def holds(self, weight: Tensor) -> bool:
        """Whether a matrix is this one, but for its number format."""
        return weight.shape == self.values.shape and torch.equal(self.floats().to(weight.dtype), weight)


def rounded(weight: Tensor) -> Grid:
    """Return the nearest 8-bit grid of floats [O, I], I a multiple of 32: off by 1/254 of a group's largest at most."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2) / 127).half().clamp(min=2**-24)  # the least of float16
    values = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return Grid(values.flatten(1).to(torch.int8), scales)


def stacked(grids: list[Grid]) -> Grid:
    """Return the matrix that has all of their outputs; ValueError if they are of two kinds."""
    values, scales, least = zip(*grids, strict=True)
    if len({one is None for one in least}) > 1:
        raise ValueError("wanted grids of one kind")
    return Grid(torch.cat(values), torch.cat(scales), None if least[0] is None else torch.cat(least))


def save(grids: Mapping[str, Grid], directory: Path) -> None:
    """Write grids by the name of their weight; those of 4 bits two in a byte."""
    tensors: dict[str, Tensor] = {}
    for name, grid in grids.items():
        values = grid.values if grid.least is None else grid.values[:, ::2] | grid.values[:, 1::2] << 4
        tensors |= {f"{name}:values": values.contiguous(), f"{name}:scales": grid.scales.contiguous()}
        if grid.least is not None:
            tensors[f"{name}:least"] = grid.least.contiguous()
    save_file(tensors, directory / FILE)


def load(directory: Path) -> dict[str, Grid]:
    """Return what `save` wrote; nothing where it wrote none."""
    if not (directory / FILE).is_file():
        return {}
    tensors, grids = load_file(directory / FILE), {}
    for key in tensors:
        name, what = key.rsplit(":", 1)
        if what == "scales":
            values, least = tensors[f"{name}:values"], tensors.get(f"{name}:least")
            if least is not None:
                values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
            grids[name] = Grid(values, tensors[key], least)
    return grids
