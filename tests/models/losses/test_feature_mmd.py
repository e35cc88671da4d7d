"""Neuron selectivity transfer by hand, and as the three means of the kernel."""

import torch

from models.losses import Drafted, feature_mmd

PLAIN = {"target_probs": torch.zeros(2, 3)}


def test_two_rows_by_hand() -> None:
    """Neurons of the target [1, 0] and [0, 1], of the draft [1, 0] twice: means of k are ½, 1 and ½."""
    drafted = Drafted(
        0,
        torch.zeros(2, 3),
        draft_hidden=torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        target_hidden=torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
        **PLAIN,
    )
    told = feature_mmd.loss(drafted, feature_mmd.Params(weight=8.0))
    torch.testing.assert_close(told, torch.tensor([2.0, 2.0]))


def test_the_mean_over_rows_is_the_discrepancy_by_the_kernel() -> None:
    rng = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(7, 5, generator=rng) for _ in range(2))
    told = feature_mmd.loss(
        Drafted(0, torch.zeros(7, 3), draft_hidden=draft, target_hidden=target, target_probs=torch.zeros(7, 3)),
        feature_mmd.Params(weight=2.0),
    )
    s, t = (torch.nn.functional.normalize(hidden, dim=0) for hidden in (draft, target))
    wanted = sum(sign * (one.T @ other).square().mean() for sign, one, other in ((1, t, t), (1, s, s), (-2, t, s)))
    torch.testing.assert_close(told.mean(), wanted)


def test_neurons_in_another_order_and_of_another_strength_are_alike() -> None:
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    draft = (target * torch.tensor([2.0, -1.0, 0.5, 3.0])).flip(1)
    drafted = Drafted(0, torch.zeros(6, 3), draft_hidden=draft, target_hidden=target, target_probs=torch.zeros(6, 3))
    torch.testing.assert_close(feature_mmd.loss(drafted, feature_mmd.Params()), torch.zeros(6))
