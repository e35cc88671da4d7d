"""Greedy verification, by hand."""

import torch

from models.verify.greedy import Params, verify


def run(draft: list[list[int]], best: list[list[int]], size: int = 4) -> tuple[list[list[int]], list[int]]:
    """Verify `draft` against a target whose most likely tokens are `best`; the draft's q is flat."""
    tokens = torch.tensor(draft)
    p = torch.nn.functional.one_hot(torch.tensor(best), size) * 0.6 + 0.1
    q = torch.full((*tokens.shape, size), 1 / size)
    verified = verify(tokens, q, p, torch.Generator(), Params())
    return verified.tokens.tolist(), verified.num_accepted.tolist()


def test_tokens_are_kept_up_to_the_first_that_is_not_the_targets() -> None:
    tokens, num_accepted = run(
        draft=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        best=[[1, 2, 3, 0], [1, 2, 0, 1], [0, 2, 3, 1], [1, 0, 3, 1]],
    )
    assert tokens == [[1, 2, 3, 0], [1, 2, 0, -1], [0, -1, -1, -1], [1, 0, -1, -1]]
    assert num_accepted == [3, 2, 0, 1]


def test_a_tie_goes_to_the_lower_token() -> None:
    p = torch.tensor([[[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]])
    q = torch.full((1, 1, 3), 1 / 3)
    verified = verify(torch.tensor([[1]]), q, p, torch.Generator(), Params())
    assert verified.tokens.tolist() == [[0, -1]]
