"""Search for a subset by trying few: a Gaussian process over the subsets tried so far says which one to try next.

Subsets are alike as far as they hold the same items: k(a, b) = exp(−|a △ b| / ℓ), ℓ a quarter of the items, so that two
random ones are nearly strangers and two that differ in one item nearly twins. Of random subsets and of those one
change away from the best, the one with the highest upper confidence bound is tried, as in SWIFT.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

PAPER = "arXiv:0912.3995, algorithm 1 (GP-UCB)"
NOISE = 1e-2  # variance of a value, of which the others have 1
BOUND = 2.5  # standard deviations above the mean
POOL = 256  # random subsets, and changes of the best, that are considered

Subset = frozenset[int]


class SubsetSearch:
    """What was tried, subsets and their values, of which higher ones are better, in order; and what to try next."""

    def __init__(self, num_items: int, rng: torch.Generator, size: int | None = None) -> None:
        """Search subsets of `num_items` items, all of a size unless that is None; ValueError if there are none such."""
        if num_items < 1 or (size is not None and not 1 <= size <= num_items):
            raise ValueError(f"wanted items, and subsets of 1 to {num_items} of them; got size {size}")
        self.num_items, self.size, self._rng = num_items, size, rng
        self.tried: list[tuple[Subset, float]] = []

    @property
    def best(self) -> tuple[Subset, float]:
        """The best subset so far, of equal ones the first; ValueError before the first."""
        return max(self.tried, key=lambda one: one[1])

    def note(self, subset: Subset, value: float) -> None:
        """Take in what a subset is worth; one may be tried again."""
        self.tried.append((subset, value))

    def random(self) -> Subset:
        """Return a subset; all sizes are equally likely where none was asked for."""
        size = self.size or self._below(self.num_items) + 1
        return frozenset(torch.randperm(self.num_items, generator=self._rng)[:size].tolist())

    def promising(self) -> Subset:
        """Return the subset, not tried yet, that may be the best; a random one if nothing was tried or all was."""
        if not self.tried:
            return self.random()
        known = {subset for subset, _ in self.tried}
        drawn = [self.random() for _ in range(POOL)] + [self._changed(self.best[0]) for _ in range(POOL)]
        pool = [subset for subset in dict.fromkeys(drawn) if subset and subset not in known]
        return pool[int(self._bounds(pool).argmax())] if pool else self.random()

    def _changed(self, subset: Subset) -> Subset:
        """Exchange an item, or where the size is free put one in or take it out."""
        if self.size is None:
            return subset ^ {self._below(self.num_items)}
        inside, outside = sorted(subset), sorted({*range(self.num_items)} - subset)
        if not outside:
            return subset
        return subset - {inside[self._below(len(inside))]} | {outside[self._below(len(outside))]}

    def _bounds(self, pool: list[Subset]) -> Tensor:
        """[n] upper confidence bounds of subsets, in standard deviations of the values."""
        seen, asked = self._rows(subset for subset, _ in self.tried), self._rows(pool)
        values = torch.tensor([value for _, value in self.tried], dtype=torch.float64)
        values = (values - values.mean()) / values.std(correction=0).clamp_min(1e-12)
        root = torch.linalg.cholesky(self._likeness(seen, seen) + NOISE * torch.eye(len(seen), dtype=torch.float64))
        cross = self._likeness(seen, asked)
        mean = cross.T @ torch.cholesky_solve(values[:, None], root)[:, 0]
        explained = torch.linalg.solve_triangular(root, cross, upper=False).square().sum(0)
        bounds: Tensor = mean + BOUND * (1 - explained).clamp_min(0).sqrt()
        return bounds

    def _likeness(self, one: Tensor, other: Tensor) -> Tensor:
        differing = one.sum(-1)[:, None] + other.sum(-1) - 2 * one @ other.T
        return torch.exp(-4 / self.num_items * differing)

    def _rows(self, subsets: Iterable[Subset]) -> Tensor:
        """[n, items], 1 where an item is in."""
        rows = [[item in subset for item in range(self.num_items)] for subset in subsets]
        return torch.tensor(rows, dtype=torch.float64)

    def _below(self, stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=self._rng))
