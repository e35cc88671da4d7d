"""Acceptance gap: what the draft is accepted on least, the draft of each round asked anew."""

import pytest
import torch
from torch import Tensor

from models.select import Sources, acceptance_gap, select

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


def test_figures_that_are_not_one_a_document_are_refused() -> None:
    with pytest.raises(ValueError, match=r"acceptance must be \[8\], one a document; got \[3\]"):
        choose(Sources(acceptance=lambda chosen: torch.ones(3)), 2, 1)


def test_a_document_without_a_figure_is_named() -> None:
    figures = torch.ones(8)
    figures[5] = float("nan")
    with pytest.raises(ValueError, match="document 5 has no score"):
        choose(Sources(acceptance=lambda chosen: figures), 2, 1)
