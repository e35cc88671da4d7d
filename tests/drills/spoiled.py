"""Drafts that are spoiled in one way each."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.eagle3_heads import WEIGHTS

Spoil = Callable[[Path], None]


def tensors_changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Spoil:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return spoil


def bytes_changed(change: Callable[[bytearray], bytes | bytearray]) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / WEIGHTS
        file.write_bytes(change(bytearray(file.read_bytes())))

    return spoil


def config_changed(**values: object) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def with_flipped_bit(content: bytearray) -> bytearray:
    content[-1] ^= 1
    return content


def with_header(content: bytearray) -> bytearray:
    content[:8] = b"\xff" * 8
    return content


def set_value(value: float) -> Spoil:
    return tensors_changed(lambda tensors: tensors["fc.weight"].view(-1)[:1].fill_(value))


def noisy(scale: float, seed: int) -> Spoil:
    """Add seeded noise to all weights."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        rng = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor + (scale * torch.randn(tensor.shape, generator=rng)).to(tensor.dtype)

    return tensors_changed(add)


NAN, INFINITE = set_value(float("nan")), set_value(float("inf"))
MISSING = tensors_changed(lambda tensors: tensors.__delitem__("fc.weight"))
EXTRA = tensors_changed(lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}))
DTYPE = tensors_changed(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].double()}))
SHAPE = tensors_changed(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, 1:].contiguous()}))
BEYOND = tensors_changed(lambda tensors: tensors["d2t"].add_(10**6))
