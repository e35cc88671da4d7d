"""Cross-entropy by hand."""

import torch

from models.losses import Drafted, cross_entropy


def test_two_rows_by_hand_of_which_one_token_can_not_be_drafted() -> None:
    logits = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]])  # probabilities ¼ and ¾
    values = cross_entropy.loss(Drafted(0, logits, token=torch.tensor([1, -1])), cross_entropy.Params())
    torch.testing.assert_close(values, torch.tensor([0.2876821, 0.0]))
