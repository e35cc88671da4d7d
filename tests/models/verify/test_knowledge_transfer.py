import math
from functools import partial

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import exact_outcome
from models.verify.knowledge_transfer import Params, choose, transferred

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64)


def outcome(p: Tensor, q: Tensor, params: Params) -> tuple[float, float]:
    """Return how often a draft is kept, and what is lost."""
    found = exact_outcome(partial(choose, params=params), p, q, 1, "independent")
    return float(found.kept), float(found.lost(p))


def test_the_target_is_moved_towards_what_the_draft_is_believed_of() -> None:
    # The draft is believed of tokens 0 and 1 with α = 0.1, and of token 0 alone with α = 0.2.
    for alpha, tilt in [(0.1, [0.4, -0.15, 0.0]), (0.2, [0.4, 0.0, 0.0]), (0.0, [0.4, -0.15, -0.25])]:
        weights = [chance * math.exp(2 * by) for chance, by in zip(P.tolist(), tilt, strict=True)]
        moved = transferred(P, Q, Params(eta=2, alpha=alpha))
        assert moved.tolist() == pytest.approx([weight / sum(weights) for weight in weights]), alpha


def test_a_token_is_kept_by_the_moved_target_and_else_the_rest_of_the_true_one_is_left() -> None:
    params = Params(eta=2, alpha=0.2)
    weight = 0.5 * math.exp(0.8)
    moved = [weight / (weight + 0.5), 0.25 / (weight + 0.5)]  # 0.69 and twice 0.155
    choice = choose(P[None], torch.tensor([[0]]), Q[None, None], params)
    assert float(choice.chances) == pytest.approx(moved[0] / 0.9)
    # Of token 1 min(0.1, 0.155) is kept, of token 2 nothing; more than 0.5 of token 0 is, so none of it is left.
    assert choice.rest[0].tolist() == pytest.approx([0, 0.15 / 0.4, 0.25 / 0.4])
    kept, lost = outcome(P, Q, params)
    assert (kept, lost) == pytest.approx((moved[0] + 0.1, moved[0] - 0.5))


def test_what_is_lost_is_what_is_kept_beyond_the_target_and_within_both_bounds() -> None:
    rng, etas = torch.Generator().manual_seed(0), (0.0, 0.2, 1.0, 10.0, 1e6)
    found = torch.zeros(len(etas), 2, dtype=torch.float64)
    for _ in range(50):
        p, q = torch.rand(2, 6, generator=rng, dtype=torch.float64) ** 3
        p, q = p / p.sum(), q / q.sum()
        for number, eta in enumerate(etas):
            kept, lost = outcome(p, q, Params(eta=eta))
            kept_of = torch.minimum(q, transferred(p, q, Params(eta=eta)))
            assert lost == pytest.approx(float((kept_of - p).clamp(min=0).sum()), abs=1e-12)
            assert lost <= min(float((p - q).abs().sum() / 2), math.tanh(eta / 2)) + 1e-12
            found[number] += torch.tensor([kept, lost]) / 50
    kept, lost = found.T.tolist()
    assert lost == sorted(lost) and kept[:4] == sorted(kept[:4])  # a step may be too long
    assert lost[0] < 1e-12 and lost[3] > 0.05


def test_a_token_that_the_target_excludes_is_not_kept() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert outcome(p, q, Params(eta=50)) == pytest.approx((0, 0))
