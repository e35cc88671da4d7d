"""Entropy: noise before what a trained proxy knows, and a long tail that the largest probability doesn't show."""

import torch

from models.select import Certainty, Proxy, Sources, entropy, select


def test_planted_documents_come_first(planted_pool: list[list[int]], planted_sources: Sources, hard: set[int]) -> None:
    rng = torch.Generator().manual_seed(0)
    chosen = select(planted_pool, 15, 2, entropy.Params(), planted_sources, rng)
    left = hard - set(chosen[:8])
    assert len(left) >= 3
    assert left <= set(chosen[8 : 8 + len(left)])


def test_scores_by_hand() -> None:
    proxy = Proxy([[1, 2]] * 3, Sources())
    proxy._certainty = Certainty(
        confidence=torch.tensor([0.9, 0.4, 0.6]),
        entropy=torch.tensor([0.3, 0.7, 1.5]),
        margin=torch.tensor([0.8, 0.3, 0.2]),
    )
    assert entropy.pick(proxy, [], 2, entropy.Params(), torch.Generator()) == [2, 1]
