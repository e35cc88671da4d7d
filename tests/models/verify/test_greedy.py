"""Greedy verification, by hand."""

import torch

from models.core.drafting.proposal import Proposal
from models.verify.greedy import Params, expected_accepted, verify


def run(
    draft: list[list[int]], best: list[list[int]], parents: tuple[int, ...] = (-1, 0, 1), size: int = 4
) -> tuple[list[list[int]], list[list[int]]]:
    """Verify `draft` against a target whose most likely tokens are `best`; return paths and tokens."""
    p = torch.nn.functional.one_hot(torch.tensor(best), size) * 0.6 + 0.1
    verified = verify(Proposal(torch.tensor(draft), parents), p, torch.Generator(), Params())
    return verified.path.tolist(), verified.tokens.tolist()


def test_tokens_are_kept_up_to_the_first_that_is_not_the_targets() -> None:
    path, tokens = run(
        draft=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        best=[[1, 2, 3, 0], [1, 2, 0, 1], [0, 2, 3, 1], [1, 0, 3, 1]],
    )
    assert tokens == [[1, 2, 3, 0], [1, 2, 0, -1], [0, -1, -1, -1], [1, 0, -1, -1]]
    assert path == [[0, 1, 2], [0, 1, -1], [-1, -1, -1], [0, -1, -1]]


def test_a_tree_is_walked_along_the_targets_tokens() -> None:
    # 0: 1 or 2 next; after 1 either 3 or 0, after 2 only 3.
    path, tokens = run(
        draft=[[1, 2, 3, 0, 3]] * 4,
        parents=(-1, -1, 0, 0, 1),
        best=[[1, 0, 2, 1, 3, 1], [2, 0, 3, 1, 1, 0], [2, 3, 1, 0, 0, 0], [3, 1, 1, 1, 1, 1]],
    )
    assert path == [[0, 3], [1, 4], [1, -1], [-1, -1]]
    assert tokens == [[1, 0, 3], [2, 3, 0], [2, 1, -1], [3, -1, -1]]


def test_of_equal_siblings_the_first_is_kept() -> None:
    path, _ = run(draft=[[1, 1, 2]], parents=(-1, -1, 1), best=[[1, 3, 2, 0]])
    assert path == [[0, -1]]


def test_a_tie_goes_to_the_lower_token() -> None:
    p = torch.tensor([[[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]])
    verified = verify(Proposal.chain([1]), p, torch.Generator(), Params())
    assert verified.tokens.tolist() == [[0, -1]]


def test_what_is_expected_is_how_far_the_draft_is_right() -> None:
    said = torch.tensor([[1, 0, 1]])
    q = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    assert expected_accepted(said, q, torch.empty(0), Params()).tolist() == [2.0]
    # A draft that draws gets the first right half of the time, then always.
    q = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]])
    assert expected_accepted(said, q, torch.empty(0), Params()).tolist() == [1.5]
