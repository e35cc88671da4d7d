"""EAGLE's loss by hand."""

import torch

from models.losses import Drafted, feature_regression


def test_a_row_by_hand() -> None:
    drafted = Drafted(
        0,
        torch.tensor([[0.0, 0.0]]),
        draft_hidden=torch.tensor([[0.5, 2.0]]),
        target_hidden=torch.tensor([[0.0, 0.0]]),
        target_probs=torch.tensor([[0.5, 0.25]]),
    )
    distance = (0.5 * 0.5**2 + (2.0 - 0.5)) / 2
    for weight in (0.0, 0.1):
        value = feature_regression.loss(drafted, feature_regression.Params(classification=weight))
        assert abs(float(value) - distance - weight * 0.75 * 0.693147) < 1e-5
