"""TVD++: the direction of total variation, in a length that does not depend on how much is rewarded."""

import torch
from torch import Tensor

from models.losses import Drafted, total_variation, tvd_plus_plus


def gradient(logits: Tensor, p: Tensor, **settings: float) -> Tensor:
    logits = logits.clone().requires_grad_()
    tvd_plus_plus.loss(Drafted(logits, target_probs=p), tvd_plus_plus.Params(**settings)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_its_gradient_is_that_of_total_variation_over_the_deviation_of_the_reward() -> None:
    rng = torch.Generator().manual_seed(1)
    p, logits = torch.randn(5, 7, generator=rng).softmax(-1), torch.randn(5, 7, generator=rng)
    free = logits.clone().requires_grad_()
    total_variation.loss(Drafted(free, target_probs=p), total_variation.Params()).sum().backward()
    q = logits.softmax(-1)
    kept = (q * (p > q)).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient(logits, p), free.grad / (kept * (1 - kept)).sqrt())


def test_where_draft_and_target_agree_nothing_is_learnt() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    assert float(gradient(p.log(), p).abs().max()) < 1e-3


def test_descent_makes_what_is_drawn_accepted_more_often() -> None:
    rng = torch.Generator().manual_seed(2)
    p = (3 * torch.randn(4, 9, generator=rng)).softmax(-1)
    logits = torch.zeros(4, 9)

    def rejected() -> float:
        return float(total_variation.loss(Drafted(logits, target_probs=p), total_variation.Params()).mean())

    before = rejected()
    for _ in range(300):
        logits = logits - 0.05 * gradient(logits, p)
    assert rejected() < 0.15 * before
