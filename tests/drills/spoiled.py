"""Drafts that are spoiled in one way each."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.core.drafting.draft_format import WEIGHTS

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
# Name to what spoils it, whether that is before it is registered, tags that differ, and why it is refused.
BAD: dict[str, tuple[Spoil | None, bool, dict[str, str], str]] = {
    "F7 truncated": (bytes_changed(lambda content: content[: len(content) // 2]), True, {}, "not a safetensors file"),
    "F7 truncated later": (bytes_changed(lambda content: content[: len(content) // 2]), False, {}, "the manifest says"),
    "F7 empty": (bytes_changed(lambda content: b""), True, {}, "not a safetensors file"),
    "F7 emptied later": (bytes_changed(lambda content: b""), False, {}, "has 0 bytes"),
    "F7 header": (bytes_changed(with_header), True, {}, "not a safetensors file"),
    "F8 bit": (bytes_changed(with_flipped_bit), False, {}, "has sha256"),
    "F9 missing": (MISSING, True, {}, "fc.weight is missing"),
    "F9 extra": (EXTRA, True, {}, "extra.weight is not one"),
    "F9 dtype": (DTYPE, True, {}, "fc.weight is torch.float64"),
    "F9 shape": (SHAPE, True, {}, "fc.weight is torch.bfloat16"),
    "F10 NaN": (NAN, True, {}, "fc.weight holds NaN"),
    "F10 infinite": (INFINITE, True, {}, "fc.weight holds NaN or infinite"),
    "architecture": (config_changed(architectures=["Other"]), True, {}, "architecture"),
    "F12 vocabulary": (config_changed(vocab_size=32_000), True, {}, "vocab_size 32000"),
    "F12 map": (BEYOND, True, {}, "d2t must name ascending tokens"),
    "F12 tag": (None, True, {"vocab_size": "32000"}, "tag vocab_size"),
    "F13 tag": (None, True, {"tokenizer_sha256": "0" * 64}, "tag tokenizer_sha256"),
    "F13 config": (config_changed(redraft={"tokenizer_sha256": "0" * 64}), True, {}, "was made for tokenizer_sha256"),
}
