import pytest
import torch

from models.core.drafting.proposal import Proposal

TREE = (-1, -1, 0, 0, 1, 2)


def test_a_tree_by_hand() -> None:
    proposal = Proposal(torch.arange(6)[None], TREE)
    assert proposal.row_parents == (-1, 0, 0, 1, 1, 2, 3)
    assert proposal.paths == ((), (0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
    assert (proposal.num_tokens, proposal.depth) == (6, 3)


def test_a_chain_is_the_tree_without_branches_and_a_token_without_chance_has_a_single_1() -> None:
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    proposal = Proposal.chain([1, 0], list(q))
    assert (proposal.parents, proposal.paths) == ((-1, 0), ((), (0,), (0, 1)))
    assert torch.equal(proposal.distributions(2), q[None])
    assert Proposal.chain([2, 0], [None, None]).distributions(3).tolist() == [[[0, 0, 1], [1, 0, 0]]]


def test_nothing_can_be_proposed() -> None:
    nothing = Proposal.chain([])
    assert (nothing.num_tokens, nothing.depth, nothing.row_parents) == (0, 0, (-1,))
    assert nothing.distributions(5).shape == (1, 0, 5)


@pytest.mark.parametrize(
    ("parents", "fault"),
    [
        ((0, 0, 1), "the parent of node 0 must be from -1 to -1, got 0"),
        ((-1, 1, 0), "the parent of node 1 must be from -1 to 0, got 1"),
        ((-1, 0, -2), "the parent of node 2 must be from -1 to 1, got -2"),
        ((-1, 0), "3 tokens need a parent each, got 2"),
    ],
)
def test_a_parent_that_does_not_stand_before_its_child_is_refused(parents: tuple[int, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Proposal(torch.zeros(1, 3, dtype=torch.int64), parents)


@pytest.mark.parametrize(
    ("token_ids", "q", "fault"),
    [
        (torch.zeros(1, 2), None, r"token_ids must be \[B, N\] int64, got \[1, 2\] torch.float32"),
        (torch.zeros(2, dtype=torch.int64), None, r"token_ids must be \[B, N\] int64, got \[2\]"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, 5), r"q must be \[1, 2, 'V'\], got \[1, 3, 5\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(token_ids: torch.Tensor, q: torch.Tensor | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Proposal(token_ids, (-1, 0), q)
