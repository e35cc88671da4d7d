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


def bytes_changed(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / WEIGHTS
        file.write_bytes(change(file.read_bytes()))

    return spoil


def config_changed(**values: object) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def noisy(scale: float, seed: int) -> Spoil:
    """Add seeded noise to all weights."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        rng = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor + (scale * torch.randn(tensor.shape, generator=rng)).to(tensor.dtype)

    return tensors_changed(add)


NAN = tensors_changed(lambda tensors: tensors["fc.weight"].view(-1)[:1].fill_(float("nan")))
CUT = bytes_changed(lambda content: content[: len(content) // 2])
FLIPPED = bytes_changed(lambda content: content[:-1] + bytes([content[-1] ^ 1]))
MISSING = tensors_changed(lambda tensors: tensors.__delitem__("fc.weight"))
FOREIGN = config_changed(redraft={"tokenizer_sha256": "0" * 64})
# Name to what spoils it, whether that is before it is registered, tags that differ, why it is refused, and whether it
# is quarantined: it may suit another service. Each fault of a file is in models/drafts/test_drafts_refused.py.
BAD: dict[str, tuple[Spoil | None, bool, dict[str, str], str, bool]] = {
    "F7 truncated": (CUT, True, {}, "not a safetensors file", True),
    "F8 bit": (FLIPPED, False, {}, "has sha256", True),
    "F9 missing": (MISSING, True, {}, "fc.weight is missing", True),
    "F10 NaN": (NAN, True, {}, "fc.weight holds NaN", True),
    "F12 tag": (None, True, {"vocab_size": "32000"}, "tag vocab_size", False),
    "F13 config": (FOREIGN, True, {}, "was made for tokenizer_sha256", True),
    "F15 promise": (None, True, {"golden_tau": "3.9"}, "promised 3.900", True),
}
