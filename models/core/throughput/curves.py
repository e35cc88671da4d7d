"""What steps take, by number of sequences: between points that are known it is linear."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

Count = TypeVar("Count", int, float)  # of tokens or passes: of a step, or the mean of several


class Curve(NamedTuple):
    """Steps of one number of sequences: ms of the target by rows a sequence, ascending, and of a pass of the draft."""

    num_sequences: int
    rows: tuple[float, ...]
    points: tuple[float, ...]
    draft: float | None = None

    def parts(self, rows: float) -> list[tuple[int, float]]:
        """Return which points the target's time at so many rows a sequence is made of, and how much of each."""
        after = bisect_right(self.rows, rows)
        if after == 0 or len(self.rows) == 1:
            return [(0, 1.0)]
        right = min(after, len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)  # above 1 beyond the last: it goes on as steep as before
        return [(right - 1, 1 - share), (right, share)]

    def target_ms(self, rows: float) -> float:
        """Return f at so many rows a sequence."""
        return on_line(self.rows, self.points, rows)


class Line(NamedTuple):
    """What steps of one number of sequences take: ms of the target by rows, both ascending, and of a pass of the draft.

    `pass_ms` is None if there was no pass. The draft takes `prompt_ms` for the prompt tokens that come with each
    emitted one, none where it rests, and `read_ms` for those of the step that is planned.
    """

    num_sequences: int
    rows: list[float]
    ms: list[float]
    pass_ms: float | None
    one_pass: bool = False
    prompt_ms: float = 0.0
    read_ms: float = 0.0

    def target_ms(self, rows: float) -> float:
        """Return what so many rows take."""
        return on_line(self.rows, self.ms, rows)

    def step_ms(self, rows: float, num_passes: float) -> float:
        """Return what a step takes, rows and passes may be means; ValueError if no pass was ever measured."""
        return self.target_ms(rows) + self.passes_ms(num_passes)

    def passes_ms(self, num_passes: float) -> float:
        """Return what a step's passes of the draft take; see `step_ms`."""
        if not num_passes:
            return 0.0
        if self.pass_ms is None:
            raise ValueError(f"wanted the time of a step with {num_passes} passes, but none was ever measured")
        return passes_made(num_passes, self.one_pass) * self.pass_ms


def on_line(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Return a value at a place: linear between known ones, before them the first, beyond them as steep as the last."""
    after = bisect_right(places, place)
    if after == 0 or len(places) == 1:
        return values[0]
    right = min(after, len(places) - 1)
    low, start = places[right - 1], values[right - 1]
    return start + (place - low) / (places[right] - low) * (values[right] - start)


def passes_made(num_tokens: Count, one_pass: bool) -> Count:
    """Return how many passes of the draft say so many tokens."""
    return min(num_tokens, 1) if one_pass else num_tokens


def between(numbers: Sequence[int], number: int) -> list[tuple[int, float]]:
    """Return the places of the two nearest of ascending numbers, and how much each counts; outside, of one."""
    after = bisect_right(numbers, number)
    if not numbers or after == 0:
        return [(0, 1.0)] if numbers else []
    if after == len(numbers) or numbers[after - 1] == number:
        return [(after - 1, 1.0)]
    share = (number - numbers[after - 1]) / (numbers[after] - numbers[after - 1])
    return [(after - 1, 1 - share), (after, share)]


def ascending(points: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the nearest points that never fall: those that do are pooled with those before them."""
    if all(left <= right for left, right in pairwise(points)):
        return tuple(points)
    pools: list[list[tuple[float, float]]] = []
    for one in zip(points, weights or [1.0] * len(points), strict=True):
        pools.append([one])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1].extend(last)
    return tuple(_mean(pool) for pool in pools for _ in pool)


def _mean(pool: Sequence[tuple[float, float]]) -> float:
    return sum(weight * point for point, weight in pool) / sum(weight for _, weight in pool)
