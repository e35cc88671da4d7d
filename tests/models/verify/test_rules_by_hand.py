"""Greedy, rejection and the rules for several children of a node by hand; rules that lose something have files."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from models.core.drafting.multi_draft import exact_outcome, most_kept
from models.core.drafting.proposal import Choice, Proposal, Siblings
from models.verify import coupled, greedy, multi_draft_optimal, reject_in_turn, rejection, spectr, without_replacement

OPTIMAL = partial(multi_draft_optimal.choose, params=multi_draft_optimal.Params())
SPECTR = partial(spectr.choose, params=spectr.Params())
RECURSIVE = partial(without_replacement.choose, params=without_replacement.Params())


def law(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64)


def certain(token: int, size: int = 4) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[token]


def run_greedy(
    draft: list[list[int]], best: list[list[int]], parents: tuple[int, ...] = (-1, 0, 1)
) -> tuple[list[list[int]], list[list[int]]]:
    """Verify `draft` against a target whose most likely tokens are `best`; return paths and tokens."""
    p = torch.nn.functional.one_hot(torch.tensor(best), 4) * 0.6 + 0.1
    verified = greedy.verify(Proposal(torch.tensor(draft), parents), p, torch.Generator(), greedy.Params())
    return verified.path.tolist(), verified.tokens.tolist()


def test_greedily_tokens_are_kept_up_to_the_first_that_is_not_the_targets() -> None:
    best = [[1, 2, 3, 0], [1, 2, 0, 1], [0, 2, 3, 1], [1, 0, 3, 1]]
    path, tokens = run_greedy([[1, 2, 3]] * 4, best)
    assert tokens == [[1, 2, 3, 0], [1, 2, 0, -1], [0, -1, -1, -1], [1, 0, -1, -1]]
    assert path == [[0, 1, 2], [0, 1, -1], [-1, -1, -1], [0, -1, -1]]


def test_greedily_a_tree_is_walked_along_the_targets_tokens() -> None:
    # 0: 1 or 2 next; after 1 either 3 or 0, after 2 only 3.
    best = [[1, 0, 2, 1, 3, 1], [2, 0, 3, 1, 1, 0], [2, 3, 1, 0, 0, 0], [3, 1, 1, 1, 1, 1]]
    path, tokens = run_greedy([[1, 2, 3, 0, 3]] * 4, best, (-1, -1, 0, 0, 1))
    assert path == [[0, 3], [1, 4], [1, -1], [-1, -1]]
    assert tokens == [[1, 0, 3], [2, 3, 0], [2, 1, -1], [3, -1, -1]]
    of_equals, _ = run_greedy([[1, 1, 2]], [[1, 3, 2, 0]], (-1, -1, 1))
    assert of_equals == [[0, -1]]  # the first


def test_greedily_a_tie_goes_to_the_lower_token() -> None:
    p = torch.tensor([[[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]])
    verified = greedy.verify(Proposal.chain([1]), p, torch.Generator(), greedy.Params())
    assert verified.tokens.tolist() == [[0, -1]]


@pytest.mark.slow
def test_rejection_keeps_a_token_as_often_as_p_over_q() -> None:
    # 0.2 / 0.8 = 1/4 is kept; what is left of p - q is all on token 1.
    count = 100_000
    proposal = Proposal(torch.zeros(count, 1, dtype=torch.int64), (-1,), torch.tensor([[[0.8, 0.2, 0.0]]] * count))
    p = torch.tensor([[[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]]] * count)
    verified = rejection.verify(proposal, p, torch.Generator().manual_seed(0), rejection.Params())
    assert verified.num_accepted.double().mean().item() == pytest.approx(0.25, abs=0.006)  # 4 standard errors
    assert set(map(tuple, verified.tokens.tolist())) == {(0, 2), (1, -1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rejection_takes_other_precisions(dtype: torch.dtype) -> None:
    proposal = Proposal(torch.tensor([[0]]), (-1,), torch.tensor([[[1.0, 0.0]]], dtype=dtype))
    p = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=dtype)
    verified = rejection.verify(proposal, p, torch.Generator().manual_seed(0), rejection.Params())
    assert verified.tokens.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("p", "q", "kept"),
    [
        (law(0.2, 0.8), law(0.8, 0.2), (0.2, 0.2)),  # 1 / (1 + 4) each
        (law(0.5, 0.25, 0.25), law(0.25, 0.5, 0.25), (1 / 4, 1 / 4, 1 / 5)),  # 1/(1+2+1), 1/(2+1+1), 1/(2+2+1)
        (law(0.3, 0.7, 0.0), law(0.0, 0.0, 1.0), (0.0, 0.0, 0.0)),
        (law(0.3, 0.7), law(0.3, 0.7), (0.3, 0.7)),
    ],
)
def test_coupled_draws_of_one_token_by_hand(p: Tensor, q: Tensor, kept: tuple[float, ...]) -> None:
    assert coupled.both(p, q).tolist() == pytest.approx(kept)
    drafted = int(q.argmax())
    choice = coupled.choose(p[None], torch.tensor([[drafted]]), q[None, None], coupled.Params())
    assert float(choice.chances) == pytest.approx(kept[drafted] / float(q[drafted]))
    assert float(choice.rest[0, drafted]) == 0 or kept[drafted] == float(q[drafted])


def test_coupled_keeps_a_certain_token_with_its_chance_and_leaves_the_others_as_they_are() -> None:
    choice = coupled.choose(
        law(0.5, 0.3, 0.2, 0.0)[None], torch.tensor([[1]]), certain(1)[None, None], coupled.Params()
    )
    assert float(choice.chances) == pytest.approx(0.3)
    assert choice.rest[0].tolist() == pytest.approx([5 / 7, 0.0, 2 / 7, 0.0])


def test_spectrs_ratio_by_hand() -> None:
    # β = min(0.8, 0.2/ρ) + 0.2 = 0.2/ρ + 0.2 here, and 1 − (1 − β)² = ρβ at ρ = 2 − β: ρ² − 1.8ρ + 0.2 = 0.
    wanted = (1.8 + math.sqrt(1.8**2 - 0.8)) / 2
    assert float(spectr.smallest_ratio(law(0.2, 0.8)[None], law(0.8, 0.2)[None], 2)) == pytest.approx(wanted, abs=1e-8)
    assert 1 < wanted < 2


@pytest.mark.parametrize("num_children", [2, 3, 4])
def test_spectr_keeps_as_much_as_the_paper_promises(num_children: int) -> None:
    laws = torch.rand(2, 10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4
    laws = laws / laws.sum(dim=-1, keepdim=True)
    for p, q in [*laws.unbind(1), (laws[0, 0], laws[0, 0])]:
        outcome = exact_outcome(SPECTR, p, q, num_children, "independent")
        chance = torch.minimum(q, p / spectr.smallest_ratio(p[None], q[None], num_children)[0]).sum()
        assert float(outcome.kept) == pytest.approx(float(1 - (1 - chance) ** num_children), abs=1e-8)
        best = float(most_kept(p[None], q[None], num_children, "independent"))
        assert (1 - 1 / math.e) * best <= float(outcome.kept) <= best + 1e-8


DIFFERENT_P, DIFFERENT_Q = law(0.1, 0.5, 0.4), law(0.6, 0.3, 0.1)


def test_without_replacement_the_second_child_is_verified_by_what_the_first_left_of_both_laws() -> None:
    # Token 0 is kept with 0.1 / 0.6. It leaves (0, 0.2, 0.3) / 0.5 of p and (0, 0.75, 0.25) of q, so that token 1 is
    # then kept with 0.4 / 0.75, and what is left is all on token 2.
    q = torch.stack([DIFFERENT_Q, law(0, 0.75, 0.25)])
    choice = RECURSIVE(DIFFERENT_P[None], torch.tensor([[0, 1]]), q[None])
    assert choice.chances[0].tolist() == pytest.approx([1 / 6, 5 / 6 * 0.4 / 0.75])
    assert choice.rest[0].tolist() == pytest.approx([0, 0, 1])


def test_without_replacement_all_tokens_drafted_leave_nothing_to_reject() -> None:
    outcome = exact_outcome(RECURSIVE, DIFFERENT_P, DIFFERENT_Q, 3, "without replacement")
    assert float(outcome.kept) == pytest.approx(1)


@pytest.mark.parametrize(
    ("tokens", "q"),
    [([0, 1], DIFFERENT_Q.repeat(1, 2, 1)), ([1, 1], None)],
    ids=["different by luck", "certain and equal"],
)
def test_without_replacement_children_drawn_with_it_are_refused(tokens: list[int], q: Tensor | None) -> None:
    proposal, p = Proposal(torch.tensor([tokens]), (-1, -1), q), DIFFERENT_P.repeat(1, 3, 1)
    with pytest.raises(ValueError, match='child 2 .* wants children drawn without replacement, rule "rejection" takes'):
        without_replacement.verify(proposal, p, torch.Generator(), without_replacement.Params())


P, Q = law(0.3, 0.1, 0.4, 0.2), law(0.5, 0.25, 0.15, 0.1)


def test_the_best_rule_keeps_a_certain_child_when_it_comes_in_the_drawn_ones_place() -> None:
    # 1 is kept with 0.1 / 0.5. Of p − r (0.3, 0, 0.1, 0) is left, so 3/4 of what is emitted instead is the certain 0.
    choice = OPTIMAL(P[None], torch.tensor([[0, 1]]), torch.stack([certain(0), law(0, 0.5, 0.3, 0.2)])[None])
    assert choice.chances[0].tolist() == pytest.approx([0.8 * 0.75, 0.2])
    assert choice.rest[0].tolist() == pytest.approx([0, 0, 1, 0])


@pytest.mark.parametrize("siblings", ["certain but one", "certain"])
@pytest.mark.parametrize("num_children", [1, 2, 4])
def test_no_rule_keeps_more_than_the_best(siblings: Siblings, num_children: int) -> None:
    rng = torch.Generator().manual_seed(num_children)
    for _ in range(20):
        p, q = torch.rand(2, 4, generator=rng, dtype=torch.float64) ** 3
        p, q = p / p.sum(), q / q.sum()
        best = float(most_kept(p[None], q[None], num_children, siblings))
        assert float(exact_outcome(OPTIMAL, p, q, num_children, siblings).kept) == pytest.approx(best)
        assert float(exact_outcome(reject_in_turn, p, q, num_children, siblings).kept) <= best + 1e-9


def test_of_equal_children_the_first_stands_for_all() -> None:
    choice = OPTIMAL(P[None], torch.tensor([[2, 2, 0]]), torch.stack([certain(2), certain(2), certain(0)])[None])
    assert choice.chances[0].tolist() == pytest.approx([0.4, 0, 0.3])
    # A drawn child may be a certain one as well, where it was drawn from all of q.
    q = torch.stack([certain(0), Q])[None]
    assert OPTIMAL(P[None], torch.tensor([[0, 0]]), q).chances[0].tolist() == pytest.approx([0, 0.3 / 0.5])


def not_zeroed(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
    """Leave certain children in what is emitted when none is kept."""
    return Choice(OPTIMAL(p, token_ids, q).chances, reject_in_turn(p, token_ids[:, 1:], q[:, 1:]).rest)


def by_p_alone(p: Tensor, token_ids: Tensor, q: Tensor) -> Choice:
    """Keep a certain child with its p once the drawn one is rejected, not with what is left of p."""
    right = OPTIMAL(p, token_ids, q)
    kept = (1 - right.chances[:, 1:]) * p.gather(1, token_ids[:, :1])
    return Choice(torch.cat([kept, right.chances[:, 1:]], dim=1), right.rest)


@pytest.mark.parametrize("wrong", [not_zeroed, by_p_alone])
def test_the_exact_law_tells_a_planted_bug(wrong) -> None:
    assert float(exact_outcome(OPTIMAL, P, Q, 2, "certain but one").lost(P)) < 1e-12
    assert float(exact_outcome(wrong, P, Q, 2, "certain but one").lost(P)) > 0.01
