"""The logarithm of acceptance: by hand, and its gradient where acceptance is small."""

import math

import pytest
import torch

from models.losses import Drafted, log_acceptance, total_variation


def test_two_tokens_by_hand() -> None:
    drafted = Drafted(0, torch.tensor([[0.25, 0.75]]).log(), target_probs=torch.tensor([[0.5, 0.5]]))
    assert float(log_acceptance.loss(drafted, log_acceptance.Params())) == pytest.approx(-math.log(0.75), abs=1e-5)


def test_where_hardly_anything_is_accepted_it_teaches_as_total_variation_over_the_acceptance() -> None:
    logits, p = torch.tensor([[0.0, 8.0]]), torch.tensor([[1.0, 0.0]])
    lengths = []
    for method in (total_variation, log_acceptance):
        free = logits.clone().requires_grad_()
        method.loss(Drafted(0, free, target_probs=p), method.Params()).sum().backward()
        assert free.grad is not None
        lengths.append(float(free.grad.norm()))
    accepted = float(total_variation.acceptance(Drafted(0, logits, target_probs=p)))
    assert lengths[1] / lengths[0] == pytest.approx(1 / accepted, rel=0.01)
    assert lengths[0] < 1e-3 < 0.5 < lengths[1]
