"""Cross-entropy by hand."""

import math

import torch

from models.losses import Drafted, cross_entropy


def test_the_token_that_came_counts_and_one_that_can_not_be_drafted_does_not() -> None:
    logits = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    told = cross_entropy.loss(Drafted(0, logits, token=torch.tensor([0, -1])), cross_entropy.Params())
    torch.testing.assert_close(told, torch.tensor([-math.log(0.25), 0.0]))
