"""A text as it is read: without what only hides a secret from patterns, each place tied to where it came from."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Soft hyphen, zero-width space and joiners, direction marks, word joiner, byte order mark.
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
FULL_WIDTH = re.compile("[\u3000\uff01-\uff5e]")
SPACED_OUT = re.compile(r"(?<!\S)(?:\S ){7,}+(?:\S(?!\S))?")  # from 7 characters on, a space after each


class Found(NamedTuple):
    """A stretch of a text, first and behind last character, and its kind."""

    start: int
    end: int
    kind: str


class View(NamedTuple):
    """A reading of a text; `places` says where each character came from, None where that is its own place."""

    text: str
    places: Sequence[int] | None

    def original(self, found: Found) -> Found:
        places = self.places
        return found if places is None else Found(places[found.start], places[found.end - 1] + 1, found.kind)


def views(text: str) -> Iterator[View]:
    """Yield the readings of a text: what is seen of it, and the same with spaced-out words closed up."""
    seen = _seen(text)
    yield seen
    runs = [match.span() for match in SPACED_OUT.finditer(seen.text)]
    if runs:
        yield _closed_up(seen, runs)


def _seen(text: str) -> View:
    if INVISIBLE.search(text) is None and FULL_WIDTH.search(text) is None:
        return View(text, None)
    kept = [place for place, character in enumerate(text) if INVISIBLE.match(character) is None]
    return View("".join(_narrow(text[place]) for place in kept), kept)


def _narrow(character: str) -> str:
    return unicodedata.normalize("NFKC", character) if FULL_WIDTH.match(character) else character


def _closed_up(seen: View, runs: Sequence[tuple[int, int]]) -> View:
    kept: list[int] = []
    end = 0
    for start, stop in runs:
        kept += range(end, start)
        kept += range(start, stop, 2)
        end = stop - 1 if seen.text[stop - 1] == " " else stop
    kept += range(end, len(seen.text))
    places = kept if seen.places is None else [seen.places[place] for place in kept]
    return View("".join(seen.text[place] for place in kept), places)
