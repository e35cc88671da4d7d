"""Hidden states of served requests, held in the worker until somebody says whether they may be written.

The target computes them for each token that it reads, and the proposer is handed those of the accepted ones. Of
requests that ask for it (`DraftOptions.capture`) they are copied here, in bfloat16, so many bytes at most. What the
prefix cache gave, and what was passed while nothing was drafted, is missing; a request's states have no gap, so they
are those after the last missing one. A file is written by a thread of its own: no step waits for a disk.
"""

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.core.learning import captured

# What no step added to for so long, and nobody claimed, goes: the recorder says within milliseconds.
UNCLAIMED_S = 60.0

log = logging.getLogger(__name__)


class Claim(NamedTuple):
    """What becomes of a request's states."""

    name: str  # which its `DraftOptions.capture` gave
    file: str = ""  # to write them to; "" drops them
    num_tokens: int = 0  # of prompt and answer; the last one was never read
    target: str = ""  # sha256 of the target's weights


@dataclass
class RequestBuffer:
    """Token ids [n] and states [n, W] of one request, piece by piece, from position `first` up to `end`."""

    first: int = 0
    end: int = 0
    num_bytes: int = 0
    touched_s: float = 0.0  # when a step added to it
    lost: bool = False  # it did not fit, and nothing more of it is held
    copied: torch.cuda.Event | None = None  # past once the device has copied all pieces; None where that is so at once
    pieces: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def add(self, position: int, token_ids: list[int], states: Tensor) -> None:
        """Add the positions from `position` on; those that were there are replaced, and all are if there is a gap."""
        if not self.first <= position <= self.end:
            self.first = position
            self.cut(0)
        self.cut(position)
        self.pieces.append((token_ids, states))
        self.end = position + len(states)
        self.num_bytes += states.nbytes

    def cut(self, end: int) -> None:
        """Drop the positions from `end` on: a preempted request reads them again."""
        while self.pieces and self.end > end:
            token_ids, states = self.pieces.pop()
            self.end -= len(states)
            self.num_bytes -= states.nbytes
            if self.end < end:
                kept = states[: end - self.end]
                self.pieces.append((token_ids[: len(kept)], kept))
                self.end, self.num_bytes = end, self.num_bytes + kept.nbytes


class Ring:
    """States of the requests that run, and of those that ended and are not claimed yet."""

    def __init__(self, layers: Sequence[int], max_bytes: int) -> None:
        """Hold states of some layers, counted as layers done, and `max_bytes` of them at most."""
        self.counts: Counter[str] = Counter()  # requests whose states were "written", and those whose were not, by why
        self._layers, self._max_bytes = tuple(layers), max_bytes
        # The one that was not added to for longest comes first.
        self._held: OrderedDict[str, RequestBuffer] = OrderedDict()
        self._num_bytes = 0  # with those that wait to be written
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Claim, RequestBuffer]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note(
        self, names: Sequence[str], borders: Sequence[int], positions: Tensor, token_ids: Tensor, states: Tensor
    ) -> None:
        """Copy what a step computed; off a GPU into pinned memory, while it goes on to compute.

        Requests whose names [B] are "" are not copied. Tokens of each lie between `borders` [B + 1] of positions and
        token ids [N], and of states [N, W].
        """
        now_s, ids = time.monotonic(), token_ids.tolist()
        copied = torch.cuda.Event() if states.is_cuda else None
        firsts = positions[list(borders[:-1])].tolist()
        for name, first, start, end in zip(names, firsts, borders[:-1], borders[1:], strict=True):
            if not name:
                continue
            held = self._held.setdefault(name, RequestBuffer())
            self._held.move_to_end(name)
            before, held.touched_s = held.num_bytes, now_s
            if not held.lost:
                copy = torch.empty_like(
                    states[start:end], dtype=torch.bfloat16, device="cpu", pin_memory=states.is_cuda
                )
                held.add(first, ids[start:end], copy.copy_(states[start:end], non_blocking=True))
                held.copied = copied
                self._count(held.num_bytes - before)
                if self._num_bytes > self._max_bytes:
                    self._drop(held, "no memory")
                    held.lost = True
        if copied is not None:
            copied.record()
        self._forget_unclaimed(now_s)

    def settle(self, claims: Iterable[Claim]) -> dict[str, int]:
        """Write or drop states of requests that have ended; return the counts so far."""
        for claim in claims:
            held = self._held.pop(claim.name, None)
            last = claim.num_tokens - 1
            if held is None:
                self.counts["gone"] += bool(claim.file)
            elif claim.file and held.first < last <= held.end and not held.lost:
                before = held.num_bytes
                held.cut(last)
                self._count(held.num_bytes - before)
                self._write_later(claim, held)
            else:
                self._drop(held, "incomplete" if claim.file else "not wanted")
        self._forget_unclaimed(time.monotonic())
        return dict(+self.counts)

    def _drop(self, held: RequestBuffer, why: str) -> None:
        self._count(-held.num_bytes)
        held.cut(0)
        self.counts[why] += not held.lost  # what was lost is counted

    def _forget_unclaimed(self, now_s: float) -> None:
        while self._held and now_s - next(iter(self._held.values())).touched_s > UNCLAIMED_S:
            self._drop(self._held.popitem(last=False)[1], "unclaimed")

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    def _write_later(self, claim: Claim, held: RequestBuffer) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="captured-states", daemon=True)
            self._thread.start()
        self._queue.put((claim, held))

    def _write(self) -> None:
        while True:
            claim, held = self._queue.get()
            if held.copied is not None:
                held.copied.synchronize()
            try:
                token_ids = [token for ids, _ in held.pieces for token in ids]
                states = torch.cat([rows for _, rows in held.pieces])
                captured.write(Path(claim.file), claim.target, self._layers, held.first, token_ids, states)
                self.counts["written"] += 1
            except OSError as error:
                self.counts["not writable"] += 1
                log.warning("hidden states of a request were not written: %s", error.strerror)
            self._count(-held.num_bytes)
            del claim, held, token_ids, states
