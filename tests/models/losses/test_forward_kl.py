"""Forward KL by hand."""

import torch

from models.losses import forward_kl


def test_two_tokens_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0]])
    value = forward_kl.loss(logits, torch.tensor([[0.5, 0.25]]), forward_kl.Params())
    assert abs(float(value) - 0.75 * 0.693147) < 1e-5
