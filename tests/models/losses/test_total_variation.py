"""Total variation is the rejection rate of the rule that it speaks of."""

import pytest
import torch

from models.losses import Drafted, total_variation


def test_three_tokens_by_hand() -> None:
    drafted = Drafted(0, torch.tensor([[0.2, 0.3, 0.5]]).log(), target_probs=torch.tensor([[0.5, 0.4, 0.1]]))
    assert float(total_variation.loss(drafted, total_variation.Params())) == pytest.approx(0.4, abs=1e-6)


def test_mass_that_can_not_be_drafted_is_rejected_whatever_the_draft_does() -> None:
    drafted = Drafted(0, torch.tensor([[0.5, 0.5]]).log(), target_probs=torch.tensor([[0.3, 0.3]]))
    assert float(total_variation.loss(drafted, total_variation.Params())) == pytest.approx(0.4, abs=1e-6)


def test_it_is_how_often_a_drawn_token_is_rejected() -> None:
    rng = torch.Generator().manual_seed(0)
    p, logits = torch.randn(1, 6, generator=rng).softmax(-1), torch.randn(1, 6, generator=rng)
    q = logits.softmax(-1)
    drawn = torch.multinomial(q[0], 200_000, replacement=True, generator=rng)
    kept = torch.rand(len(drawn), generator=rng) < (p[0] / q[0])[drawn]
    told = total_variation.loss(Drafted(0, logits, target_probs=p), total_variation.Params())
    assert 1 - float(kept.float().mean()) == pytest.approx(float(told), abs=5e-3)
