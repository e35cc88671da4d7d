"""Isotonic regression: what is known to rise with its place, and was measured with errors."""

from collections.abc import Sequence
from itertools import pairwise


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
