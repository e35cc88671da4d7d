"""Every loss: one value a row, smallest when q is p, seeded by nothing."""

import pytest
import torch

from models.catalog import load, names

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])


@pytest.mark.parametrize("name", names("losses"))
def test_a_loss_is_least_where_the_draft_says_what_the_target_says(name: str) -> None:
    method = load("losses", name)
    best = method.loss(P.log(), P, method.Params())
    assert best.shape == (2,)
    for seed in range(20):
        other = P.log() + 0.3 * torch.randn(P.shape, generator=torch.Generator().manual_seed(seed))
        assert (method.loss(other, P, method.Params()) >= best - 1e-6).all()


@pytest.mark.parametrize("name", names("losses"))
def test_shapes_that_differ_are_refused(name: str) -> None:
    method = load("losses", name)
    with pytest.raises(ValueError, match="wanted the same"):
        method.loss(P[:, :2], P, method.Params())
