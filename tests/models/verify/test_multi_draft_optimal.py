"""The best rule for children that are certain but for one, by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import exact_outcome, most_kept
from models.core.drafting.proposal import Choice, Proposal, Siblings
from models.verify import reject_in_turn
from models.verify.multi_draft_optimal import Params, choose, verify

P = torch.tensor([0.3, 0.1, 0.4, 0.2], dtype=torch.float64)
Q = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
RULE = partial(choose, params=Params())


def laws(*tokens: int | None) -> Tensor:
    """Return [1, k, 4] what children were drawn from: certain ones, and Q without token 0 for None."""
    drawn = torch.tensor([0, 0.5, 0.3, 0.2], dtype=torch.float64)
    return torch.stack([drawn if token is None else torch.eye(4).double()[token] for token in tokens])[None]


def test_a_certain_child_is_kept_when_it_comes_in_the_drawn_ones_place() -> None:
    # 1 is kept with 0.1 / 0.5. Of p − r (0.3, 0, 0.1, 0) is left, so 3/4 of what is emitted instead is the certain 0.
    choice = RULE(P[None], torch.tensor([[0, 1]]), laws(0, None))
    assert choice.chances[0].tolist() == pytest.approx([0.8 * 0.75, 0.2])
    assert choice.rest[0].tolist() == pytest.approx([0, 0, 1, 0])


def test_p_of_the_certain_and_what_p_and_q_share_elsewhere_is_kept() -> None:
    outcome = exact_outcome(RULE, P, Q, 2, "certain but one")
    assert float(outcome.kept) == pytest.approx(0.3 + 0.1 + 0.3 + 0.2)


@pytest.mark.parametrize("siblings", ["certain but one", "certain"])
@pytest.mark.parametrize("num_children", [1, 2, 3, 4])
def test_no_rule_keeps_more(siblings: Siblings, num_children: int) -> None:
    rng = torch.Generator().manual_seed(num_children)
    for _ in range(20):
        p, q = torch.rand(2, 4, generator=rng, dtype=torch.float64) ** 3
        p, q = p / p.sum(), q / q.sum()
        best = float(most_kept(p[None], q[None], num_children, siblings))
        assert float(exact_outcome(RULE, p, q, num_children, siblings).kept) == pytest.approx(best)
        assert float(exact_outcome(reject_in_turn, p, q, num_children, siblings).kept) <= best + 1e-9


def test_rejection_keeps_less_of_the_same_children() -> None:
    # 0.3 + Σ min(p, 0.7 r) = 0.3 + 0.1 + 0.21 + 0.14.
    assert float(exact_outcome(reject_in_turn, P, Q, 2, "certain but one").kept) == pytest.approx(0.75)


def test_of_equal_children_the_first_stands_for_all() -> None:
    choice = RULE(P[None], torch.tensor([[2, 2, 0]]), laws(2, 2, 0))
    assert choice.chances[0].tolist() == pytest.approx([0.4, 0, 0.3])
    # A drawn child may be a certain one as well, where it was drawn from all of q.
    q = torch.stack([torch.eye(4).double()[0], Q])[None]
    assert RULE(P[None], torch.tensor([[0, 0]]), q).chances[0].tolist() == pytest.approx([0, 0.3 / 0.5])


def test_two_drawn_children_are_refused() -> None:
    proposal = Proposal(torch.tensor([[0, 1, 2]]), (-1, -1, -1), torch.cat([laws(0), Q.repeat(1, 2, 1)], dim=1))
    with pytest.raises(ValueError, match="2 children of a node were drawn; rule multi_draft_optimal wants all certain"):
        verify(proposal, P.repeat(1, 4, 1), torch.Generator(), Params())


def not_zeroed(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
    """Leave certain children in what is emitted when none is kept."""
    return Choice(RULE(p, token_ids, q).chances, reject_in_turn(p, token_ids[:, 1:], q[:, 1:]).rest)


def by_p_alone(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
    """Keep a certain child with its p once the drawn one is rejected, not with what is left of p."""
    right = RULE(p, token_ids, q)
    certain = (1 - right.chances[:, 1:]) * p.gather(1, token_ids[:, :1])
    return Choice(torch.cat([certain, right.chances[:, 1:]], dim=1), right.rest)


@pytest.mark.parametrize("wrong", [not_zeroed, by_p_alone])
def test_the_law_tells_a_planted_bug(wrong) -> None:
    assert float(exact_outcome(RULE, P, Q, 2, "certain but one").lost(P)) < 1e-12
    assert float(exact_outcome(wrong, P, Q, 2, "certain but one").lost(P)) > 0.01
