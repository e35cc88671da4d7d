"""Greedy k-center: a line by hand, and clusters that random choices miss."""

import torch
from torch import Tensor

from models.select import Proxy, Sources, draw, kcenter


def proxy(states: Tensor) -> Proxy:
    """A proxy whose target's states are given."""
    made = Proxy([[1, 2]] * len(states), Sources())
    made.features = states
    return made


def pick(states: Tensor, chosen: list[int], num_wanted: int, seed: int = 0) -> list[int]:
    return kcenter.pick(proxy(states), chosen, num_wanted, kcenter.Params(), torch.Generator().manual_seed(seed))


def test_a_line_by_hand() -> None:
    states = torch.tensor([[0.0], [1.0], [4.0], [9.0], [10.0]])
    # From 1 the farthest is 10 (at 9); then 4, 3 from 1 and 6 from 10, before 0 and 9, each at 1; of equals the first.
    assert pick(states, [1], 4) == [4, 2, 0, 3]


def test_copies_of_a_chosen_document_come_last_and_none_comes_twice() -> None:
    states = torch.tensor([[0.0], [0.0], [5.0], [0.0]])
    assert pick(states, [0], 3) == [2, 1, 3]


def test_it_covers_clusters_that_random_misses() -> None:
    # One cluster of 182 documents and 9 of 2: a random choice of 10 hits a given pair with chance 0.1, so all nine of
    # them with 1e-9.
    rng = torch.Generator().manual_seed(0)
    clusters = torch.tensor([0] * 182 + [1 + place // 2 for place in range(18)])
    centers = 10 * torch.randn(10, 32, generator=rng)
    states = centers[clusters] + 0.1 * torch.randn(200, 32, generator=rng)
    for seed in range(20):
        assert clusters[pick(states, [], 10, seed)].unique().numel() == 10
        assert clusters[draw(200, (), 10, torch.Generator().manual_seed(seed))].unique().numel() < 7
