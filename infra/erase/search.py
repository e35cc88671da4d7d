"""Finding a text again, wherever a stretch of 24 bytes of it was copied to: verbatim, as JSON, or as token ids.

All stretches of the text are hashed, and all stretches of what is searched, by one polynomial, so that the cost does
not grow with the number of texts. What other people's rows say too, such as a system prompt, is nobody's own and is
left out.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.consent import QueryRow

WIDTH, CHUNK_BYTES, BATCH_FORMS = 24, 1 << 22, 4000
FACTOR, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
TABLE_BITS = 24
MARK = re.compile(r"<\|[^|<>]{1,32}\|>|</?s>|\[/?INST\]")  # a template's, between what people wrote
IDS = re.compile(rb"[\d, ]+")

Span = tuple[int, int]
Hashes = NDArray[np.uint64]


class Search:
    """Finds stretches of some rows' text that is not others' too."""

    def __init__(self, rows: Iterable[QueryRow], others: Iterable[QueryRow] = ()) -> None:
        wanted = _hashed(form for row in rows for form in forms(row))
        if len(wanted):
            wanted = np.setdiff1d(wanted, _hashed(form for row in others for form in forms(row)), assume_unique=True)
        self._wanted = wanted
        self._table = np.zeros(1 << TABLE_BITS, dtype=bool)
        self._table[_places(wanted)] = True

    def stands_in(self, file: Path) -> bool:
        if not file.stat().st_size:
            return False
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
            return any(True for begin in range(0, len(content), CHUNK_BYTES) for _ in self._starts(content, begin))

    def spans(self, content: bytes) -> list[Span]:
        """Return where the text stands, first and behind last byte, from left to right, without overlaps."""
        starts = [one for begin in range(0, len(content), CHUNK_BYTES) for one in self._starts(content, begin)]
        spans: list[Span] = []
        for start in starts:
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], start + WIDTH)
            else:
                spans.append((start, start + WIDTH))
        return spans

    def _starts(self, content: bytes | mmap, begin: int) -> Iterator[int]:
        hashes = _windows(content[begin : begin + CHUNK_BYTES + WIDTH - 1])
        likely = np.nonzero(self._table[_places(hashes)])[0]
        found = likely[np.isin(hashes[likely], self._wanted)]
        yield from (begin + int(place) for place in found)


def forms(row: QueryRow) -> Iterator[bytes]:
    for text in (row.prompt, row.completion):
        for piece in MARK.split(text or ""):
            escaped = json.dumps(piece)[1:-1]
            unicode = json.dumps(piece, ensure_ascii=False)[1:-1]
            yield from (form.encode() for form in dict.fromkeys((piece, unicode, escaped, json.dumps(escaped)[1:-1])))
    for ids in (row.prompt_ids, row.completion_ids):
        yield from (json.dumps(ids or [], separators=(mark, ":"))[1:-1].encode() for mark in (", ", ","))


def redacted(content: bytes, spans: Sequence[Span]) -> bytes:
    """Return the bytes with stretches overwritten, as long as before; text stays text, and JSON stays JSON."""
    changed = bytearray(content)
    for start, end in spans:
        start, end = _whole(content, start, end)
        piece = content[start:end]
        if IDS.fullmatch(piece):
            changed[start:end] = re.sub(rb"\d+", lambda number: b"0".ljust(len(number[0])), piece)
        else:
            changed[start:end] = b"*" * len(piece)
    return bytes(changed)


def _whole(content: bytes, start: int, end: int) -> Span:
    """Widen a stretch so that it cuts no number of a list, no escape and no character of several bytes."""
    if IDS.fullmatch(content[start:end]):
        while start and content[start - 1 : start].isdigit():
            start -= 1
        while content[end : end + 1].isdigit():
            end += 1
        return start, end
    if cut := re.search(rb"\\+(?:u[0-9a-f]{0,3})?$", content[max(0, start - 16) : start]):
        start -= len(cut[0])
    while start and content[start] & 0xC0 == 0x80:
        start -= 1
    if content[end - 1 : end] == b"\\":  # an escape of several levels is one
        while content[end : end + 1] == b"\\":
            end += 1
        end += 5 if content[end : end + 1] == b"u" else 1
    while end < len(content) and content[end] & 0xC0 == 0x80:
        end += 1
    return start, end


def _windows(content: bytes) -> Hashes:
    data = np.frombuffer(content, dtype=np.uint8).astype(np.uint64)
    number = max(0, len(data) - WIDTH + 1)
    hashes = np.zeros(number, dtype=np.uint64)
    for offset in range(WIDTH if number else 0):
        hashes *= FACTOR
        hashes += data[offset : offset + number]
    return hashes


def _hashed(contents: Iterable[bytes]) -> Hashes:
    hashes, left = np.zeros(0, dtype=np.uint64), iter(contents)
    while batch := [_windows(content) for content in islice(left, BATCH_FORMS)]:
        hashes = np.union1d(hashes, np.concatenate(batch))
    return hashes


def _places(hashes: Hashes) -> NDArray[np.int64]:
    return ((hashes * MIX) >> np.uint64(64 - TABLE_BITS)).astype(np.int64)
