"""Hidden states that a served target computed anyway, a file for each answer, so that training need not run it again.

A file says whose states they are and holds one row of bfloat16 for each position from `first` on, which is after what
the engine's prefix cache gave; the answer's last token was never read by the target. Nothing of it is trusted: a file
of another target, of other layers, of other tokens or with a flipped bit is as good as none.
"""

import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.types import Frozen

FORMAT = 1
HEADER_BYTES = 4096


class Header(Frozen):
    """The first line of a file.

    Attributes:
        target: sha256 of the target's weights, see `models.targets.TargetCard`.
        layers: residual streams, counted as layers done, ascending.
        width: values of a row, len(layers)·H.
        first: position of the first row.
        length: number of rows.
        tokens: CRC-32 of their token ids, each as eight bytes, little-endian.
        rows: CRC-32 of the rows.
    """

    format: int = FORMAT
    target: str
    layers: tuple[int, ...]
    width: int
    first: int
    length: int
    tokens: int
    rows: int


class Captured(NamedTuple):
    """States [length, len(layers)·H] of an answer's positions from `first` on, up to the last but one."""

    first: int
    states: Tensor


def write(file: Path, target: str, layers: Sequence[int], first: int, token_ids: Sequence[int], states: Tensor) -> None:
    """Write a file that only its owner may read, whole or not at all; its folder is there.

    `token_ids` [N] are those whose states [N, W] bfloat16 follow `first`.
    """
    rows = states.contiguous().view(torch.int16).numpy().data
    header = Header(
        target=target,
        layers=tuple(layers),
        width=states.shape[1],
        first=first,
        length=len(token_ids),
        tokens=_crc_of(token_ids),
        rows=zlib.crc32(rows),
    )
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(header.model_dump_json().encode() + b"\n")
            stream.write(rows)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read(file: Path, target: str, layers: Sequence[int], token_ids: Sequence[int]) -> Captured:
    """Read what was captured of an answer, states of a target at some layers, in that order.

    `token_ids` [T] are prompt and answer.

    Raises:
        OSError: there is no such file.
        ValueError: the file is no use, and why in a few words.
    """
    content = file.read_bytes()
    line, _, body = content.partition(b"\n") if b"\n" in content[:HEADER_BYTES] else (b"", b"", b"")
    try:
        header = Header.model_validate_json(line)
    except ValueError:
        raise ValueError("corrupt") from None
    if header.target != target:
        raise ValueError("of another target")
    if not set(layers) <= set(header.layers):
        raise ValueError("of other layers")
    if len(body) != 2 * header.length * header.width or zlib.crc32(body) != header.rows:
        raise ValueError("corrupt")
    end = len(token_ids) - 1
    if header.first + header.length != end or header.tokens != _crc_of(token_ids[header.first : end]):
        raise ValueError("of other tokens")
    rows = torch.frombuffer(bytearray(body), dtype=torch.int16).view(torch.bfloat16)
    of_layers = rows.view(header.length, len(header.layers), header.width // len(header.layers))
    places = [header.layers.index(layer) for layer in layers]
    return Captured(header.first, of_layers[:, places].flatten(1))


class Captures:
    """What was captured of served answers, for whoever wants their states.

    Attributes:
        counts: answers that were found "captured" or "missing", or whose file was ignored, by why.
    """

    def __init__(self, path_of: Callable[[str], Path], target: str) -> None:
        """Look for an answer's file where `path_of` its id says, and take only states of a target."""
        self.counts: Counter[str] = Counter()
        self._path_of, self._target = path_of, target

    def find(self, id: str, token_ids: Sequence[int], layers: Sequence[int]) -> Captured | None:
        """Return what can be used of an answer, None if the target must be run."""
        found, what = None, "captured"
        try:
            found = read(self._path_of(id), self._target, layers, token_ids)
        except FileNotFoundError:
            what = "missing"
        except OSError:
            what = "unreadable"
        except ValueError as error:
            what = str(error)
        self.counts[what] += 1
        return found


def _crc_of(token_ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(token_ids, dtype="<i8").tobytes())
