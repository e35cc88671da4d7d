"""k-sequential selection, by hand."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import exact_outcome, most_kept
from models.core.drafting.proposal import Choice, Proposal
from models.verify import reject_in_turn
from models.verify.spectr import Params, choose, smallest_ratio, verify

P = torch.tensor([0.2, 0.8], dtype=torch.float64)
Q = torch.tensor([0.8, 0.2], dtype=torch.float64)
RULE = partial(choose, params=Params())


def random_laws(seed: int, count: int, size: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    weights = torch.rand(count, size, generator=rng, dtype=torch.float64) ** 4
    return weights / weights.sum(dim=-1, keepdim=True)


def test_the_ratio_by_hand() -> None:
    # β = min(0.8, 0.2/ρ) + 0.2 = 0.2/ρ + 0.2 here, and 1 − (1 − β)² = ρβ at ρ = 2 − β: ρ² − 1.8ρ + 0.2 = 0.
    wanted = (1.8 + math.sqrt(1.8**2 - 0.8)) / 2
    assert float(smallest_ratio(P[None], Q[None], 2)) == pytest.approx(wanted, abs=1e-8)
    assert 1 < wanted < 2


def test_equal_laws_keep_the_first_child() -> None:
    choice = RULE(P[None], torch.tensor([[1, 0]]), P.expand(1, 2, 2))
    assert choice.chances[0].tolist() == pytest.approx([1, 0], abs=1e-8)


@pytest.mark.parametrize("num_children", [2, 3, 4])
def test_what_is_kept_is_as_much_as_the_paper_promises(num_children: int) -> None:
    for p, q in zip(random_laws(1, 10, 4), random_laws(2, 10, 4), strict=True):
        outcome = exact_outcome(RULE, p, q, num_children, "independent")
        chance = torch.minimum(q, p / smallest_ratio(p[None], q[None], num_children)[0]).sum()
        assert float(outcome.kept) == pytest.approx(float(1 - (1 - chance) ** num_children), abs=1e-8)
        best = float(most_kept(p[None], q[None], num_children, "independent"))
        assert (1 - 1 / math.e) * best <= float(outcome.kept) <= best + 1e-8


@pytest.mark.parametrize(
    ("q", "tokens"), [(torch.stack([Q, P])[None], [0, 1]), (None, [0, 1])], ids=["drawn from two laws", "certain"]
)
def test_children_of_different_laws_are_refused(q: Tensor | None, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="rule spectr wants them drawn independently from one"):
        verify(Proposal(torch.tensor([tokens]), (-1, -1), q), P.repeat(1, 3, 1), torch.Generator(), Params())


def with_ratio(ratio: float) -> float:
    """Return what is lost when ρ is another than the rule's and the rest is made to follow."""

    def wrong(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
        passes = torch.minimum(q[:, 0], p / ratio)
        chance = passes.sum(dim=-1, keepdim=True)
        each = (passes / q[:, 0]).gather(1, token_ids)
        missing = (p - passes * (1 - (1 - chance) ** 2) / chance).clamp(min=0)
        reached = torch.stack([torch.ones(len(p)), 1 - each[:, 0]], dim=1)
        return Choice(reached * each, missing / missing.sum(dim=-1, keepdim=True))

    return float(exact_outcome(wrong, P, Q, 2, "independent").lost(P))


def test_the_law_tells_a_ratio_that_is_too_small_and_a_residual_of_another_rule() -> None:
    right = float(smallest_ratio(P[None], Q[None], 2))
    assert with_ratio(right) < 1e-8
    assert with_ratio(2.0) < 1e-8  # larger than needed keeps less, and stays lossless
    assert with_ratio(1.0) > 0.01

    def residual_of_rejection(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
        return Choice(RULE(p, token_ids, q).chances, reject_in_turn(p, token_ids[:, :1], q[:, :1]).rest)

    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64)
    assert float(exact_outcome(residual_of_rejection, p, q, 2, "independent").lost(p)) > 0.01
