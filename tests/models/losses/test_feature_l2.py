"""FitNets' hint and the token by hand."""

import torch

from models.losses import Drafted, feature_l2


def test_the_mean_square_of_the_distance_and_the_token_that_came() -> None:
    drafted = Drafted(
        0,
        torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log(),
        draft_hidden=torch.tensor([[1.0, 3.0], [1.0, 3.0]]),
        target_hidden=torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        token=torch.tensor([0, -1]),
    )
    for weight in (0.0, 0.5):
        told = feature_l2.loss(drafted, feature_l2.Params(classification=weight))
        torch.testing.assert_close(told, torch.tensor([2.5 + weight * 1.386294, 2.5]))
