"""Which tokens of an image a draft goes on reading.

An image is a run of image tokens. It is judged by the token that comes after it, as soon as the target has read that:
what it looks at most is kept, and rows of later tokens don't see the rest. What saw the rest before stays as it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def ended(images: Sequence[bool], start: int) -> Iterator[tuple[int, int]]:
    """Yield (first, place after the last) of the runs of images that end before a place from `start` on."""
    first: int | None = None
    for place, image in enumerate(images):
        if image and first is None:
            first = place
        elif not image and first is not None:
            if place >= start:
                yield first, place
            first = None


def left_out(scores: Tensor, share: float) -> Tensor:
    """Return the places [·] of tokens that are not of the `share`, one at least, with the highest `scores` [n]."""
    return scores.argsort(descending=True, stable=True)[max(1, int(len(scores) * share)) :]


def require_tokens(tokens: Any, vocab_size: int) -> tuple[int, int] | None:
    """Return the first and the last image token; ValueError if they are no range of the target's."""
    if tokens is None:
        return None
    numbers = isinstance(tokens, list) and all(type(one) is int for one in tokens)
    if not numbers or len(tokens) != 2 or not 0 <= tokens[0] <= tokens[1] < vocab_size:
        raise ValueError(f"image_tokens must be the first and the last of 0 to {vocab_size - 1}; got {tokens}")
    return tokens[0], tokens[1]
