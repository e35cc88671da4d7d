"""`acceptance_gap` and `kcenter` by hand; methods of one figure are in the contract."""

import pytest
import torch
from torch import Tensor

from models.select import Proxy, Sources, acceptance_gap, kcenter, select

POOL = [[1, 2]] * 8


def choose(sources: Sources, num_chosen: int, num_rounds: int) -> list[int]:
    return select(POOL, num_chosen, num_rounds, acceptance_gap.Params(), sources, torch.Generator())


def test_the_planted_documents_come_first_and_each_round_asks_the_draft_of_its_own() -> None:
    lengths = torch.tensor([2.5, 1.2, 2.9, 1.1, 2.8, 2.6, 1.3, 2.7])

    def accepted(chosen: list[int]) -> Tensor:
        # A draft that learnt document 3 is accepted on 6 as well.
        return lengths.index_fill(0, torch.tensor([6]), 3.0) if 3 in chosen else lengths

    assert choose(Sources(acceptance=accepted), 2, 1) == [3, 1]
    assert choose(Sources(acceptance=accepted), 3, 1) == [3, 1, 6]
    assert choose(Sources(acceptance=accepted), 4, 2) == [3, 1, 0, 5]


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ([1.0] * 3, r"acceptance must be \[8\], one a document; got \[3\]"),
        ([1.0] * 5 + [float("nan")] + [1.0] * 2, "document 5 has no score"),
    ],
)
def test_documents_without_a_figure_are_refused(figures: list[float], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        choose(Sources(acceptance=lambda chosen: torch.tensor(figures)), 2, 1)


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
