"""Activation boundaries by hand."""

import pytest
import torch

from models.losses import Drafted, activation_boundary


def told(draft: list[float], target: list[float], **params: float) -> float:
    drafted = Drafted(
        0,
        torch.zeros(1, 2),
        draft_hidden=torch.tensor([draft]),
        target_hidden=torch.tensor([target]),
        target_probs=torch.zeros(1, 2),
    )
    return float(activation_boundary.loss(drafted, activation_boundary.Params(**params)))


def test_entries_that_are_not_on_their_side_by_the_margin_cost_the_square_of_what_is_missing() -> None:
    """On: 0.5 misses 0.5 and −2 misses 3; off: 1 misses 2, −5 nothing."""
    value = told([0.5, -2.0, 1.0, -5.0], [3.0, 0.1, -4.0, 0.0], weight=2.0)
    assert value == pytest.approx(2.0 * (0.25 + 9.0 + 4.0 + 0.0) / 4)


def test_how_strong_an_entry_is_costs_nothing_beyond_the_margin() -> None:
    assert told([1.0, 70.0, -1.0], [0.1, 0.1, -9.0]) == 0.0
    assert told([1.0, 70.0, -1.0], [0.1, 0.1, -9.0], margin=3.0) == pytest.approx((4.0 + 4.0) / 3)


def test_a_margin_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        activation_boundary.Params(margin=0.0)
