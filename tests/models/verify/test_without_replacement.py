"""Recursive rejection of children that are all different, by hand."""

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import draw, exact_outcome
from models.core.drafting.proposal import Choice, Proposal, Siblings
from models.verify import rejection
from models.verify.without_replacement import Params, choose, verify

P = torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64)
Q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


def test_the_second_child_is_judged_by_what_the_first_left_of_both_laws() -> None:
    # Token 0 is kept with 0.1 / 0.6. It leaves (0, 0.2, 0.3) / 0.5 of p and (0, 0.75, 0.25) of q, so that token 1 is
    # then kept with 0.4 / 0.75, and what is left is all on token 2.
    q = torch.stack([Q, torch.tensor([0, 0.75, 0.25])])
    choice = choose(P[None], torch.tensor([[0, 1]]), q[None], Params())
    assert choice.chances[0].tolist() == pytest.approx([1 / 6, 5 / 6 * 0.4 / 0.75])
    assert choice.rest[0].tolist() == pytest.approx([0, 0, 1])


def test_all_tokens_drafted_leave_nothing_to_reject() -> None:
    outcome = exact_outcome(lambda p, x, q: choose(p, x, q, Params()), P, Q, 3, "without replacement")
    assert float(outcome.kept) == pytest.approx(1)


def test_more_is_kept_than_of_as_many_independent_children() -> None:
    def kept(siblings: Siblings) -> float:
        outcome = exact_outcome(lambda p, x, q: rejection.choose(p, x, q, rejection.Params()), P, Q, 2, siblings)
        return float(outcome.kept)

    assert kept("without replacement") > kept("independent") + 0.05


@pytest.mark.parametrize(
    ("tokens", "q"),
    [([0, 0], Q.repeat(1, 2, 1)), ([0, 1], Q.repeat(1, 2, 1)), ([1, 1], None)],
    ids=["the same token twice", "different by luck", "certain and equal"],
)
def test_children_drawn_with_replacement_are_refused(tokens: list[int], q: Tensor | None) -> None:
    proposal = Proposal(torch.tensor([tokens]), (-1, -1), q)
    with pytest.raises(ValueError, match='child 2 .* wants children drawn without replacement, rule "rejection" takes'):
        verify(proposal, P.repeat(1, 3, 1), torch.Generator().manual_seed(0), Params())


def test_a_branching_tree_from_gumbel_top_k_is_verified() -> None:
    rng = torch.Generator().manual_seed(1)
    drawn = draw(Q.expand(50_000, -1), 2, "without replacement", rng)
    proposal = Proposal(drawn.token_ids, (-1, -1), drawn.q)
    p = torch.stack([P, torch.eye(3)[0].double(), torch.eye(3)[2].double()]).expand(50_000, -1, -1)
    verified = verify(proposal, p, rng, Params())
    frequencies = verified.tokens[:, 0].bincount(minlength=3) / 50_000
    assert frequencies.tolist() == pytest.approx(P.tolist(), abs=0.009)  # 4 standard errors
    assert set(verified.tokens[verified.path[:, 0] == 0, 1].tolist()) == {0}
    assert set(verified.tokens[verified.path[:, 0] == 1, 1].tolist()) == {2}


def second_against(p_left: str, q_left: str) -> float:
    """Return what is lost when the second child meets p or q as they were."""

    def wrong(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
        right = choose(p, token_ids, q, Params())
        first = right.chances[:, :1]
        left = p if p_left == "as it was" else (p - q[:, 0]).clamp(min=0)
        left = torch.where(left.sum(1, True) > 0, left / left.sum(1, True), p)
        law = q[:, 0] if q_left == "as it was" else q[:, 1]
        second = (1 - first) * (left / law).gather(1, token_ids[:, 1:]).clamp(max=1)
        return Choice(torch.cat([first, second], dim=1), right.rest)

    return float(exact_outcome(wrong, P, Q, 2, "without replacement").lost(P))


def test_the_law_tells_a_child_that_is_judged_by_laws_as_they_were() -> None:
    assert second_against("renewed", "renewed") < 1e-12
    assert second_against("as it was", "renewed") > 0.01
    assert second_against("renewed", "as it was") > 0.01
