"""Attention transfer by hand."""

import math

import torch

from models.losses import Drafted, attention_transfer


def test_the_strength_of_rows_is_compared_and_not_their_direction() -> None:
    """Sums of squares 3 and 4 of the draft, 8 and 6 of the target: maps (3, 4) / 5 and (4, 3) / 5."""
    drafted = Drafted(
        0,
        torch.zeros(2, 2),
        draft_hidden=torch.tensor([[math.sqrt(3), 0.0], [0.0, 2.0]]),
        target_hidden=torch.tensor([[2.0, -2.0], [math.sqrt(3), math.sqrt(3)]]),
        target_probs=torch.tensor([[0.5, 0.5], [1.0, 0.0]]),
    )
    for weight in (0.0, 50.0):
        told = attention_transfer.loss(drafted, attention_transfer.Params(weight=weight))
        torch.testing.assert_close(told, torch.full((2,), math.log(2) + weight / 2 * 0.2**2))


def test_a_feature_as_strong_everywhere_costs_nothing() -> None:
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    drafted = Drafted(
        0, torch.zeros(6, 3), draft_hidden=-3 * target, target_hidden=target, target_probs=torch.zeros(6, 3)
    )
    told = attention_transfer.loss(drafted, attention_transfer.Params())
    torch.testing.assert_close(told, torch.zeros(6), atol=1e-6, rtol=0)
