"""Random choice: each document as often as any other."""

import torch

from models.select import Sources, random, select


def test_every_document_is_chosen_about_equally_often() -> None:
    rng, counts = torch.Generator().manual_seed(0), torch.zeros(8)
    for _ in range(400):
        counts[select([[1, 2]] * 8, 2, 2, random.Params(), Sources(), rng)] += 1
    # Each count is binomial(400, 1/4) with deviation 8.7; all eight stay within 4.5 of them but in 1 of 20,000 seeds.
    assert (counts - 100).abs().max() < 4.5 * 8.7
