"""Forward KL by hand."""

import torch

from models.losses import Drafted, forward_kl


def test_two_tokens_by_hand() -> None:
    drafted = Drafted(0, torch.tensor([[0.0, 0.0]]), target_probs=torch.tensor([[0.5, 0.25]]))
    assert abs(float(forward_kl.loss(drafted, forward_kl.Params())) - 0.75 * 0.693147) < 1e-5
