"""Speculative sampling, by hand."""

import pytest
import torch

from models.core.drafting.proposal import Proposal
from models.verify import Verified
from models.verify.rejection import Params, expected_accepted, verify


def blocks(
    count: int,
    draft: list[int],
    q: list[list[float]] | None,
    p: list[list[float]],
    dtype: torch.dtype = torch.float32,
    parents: tuple[int, ...] | None = None,
) -> Verified:
    """Verify the same block `count` times, a chain unless told otherwise."""
    proposal = Proposal(
        torch.tensor([draft] * count),
        tuple(range(-1, len(draft) - 1)) if parents is None else parents,
        None if q is None else torch.tensor([q] * count, dtype=dtype),
    )
    return verify(proposal, torch.tensor([p] * count, dtype=dtype), torch.Generator().manual_seed(0), Params())


@pytest.mark.slow
def test_a_token_is_kept_as_often_as_p_over_q() -> None:
    # 0.2 / 0.8 = 1/4 is kept; what is left of p - q is all on token 1.
    verified = blocks(100_000, [0], q=[[0.8, 0.2, 0.0]], p=[[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]])
    assert verified.num_accepted.double().mean().item() == pytest.approx(0.25, abs=0.006)  # 4 standard errors
    assert set(map(tuple, verified.tokens.tolist())) == {(0, 2), (1, -1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_taken(dtype: torch.dtype) -> None:
    verified = blocks(10, [0], q=[[1.0, 0.0]], p=[[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    assert verified.tokens.tolist() == [[0, 1]] * 10


def test_a_sibling_is_judged_by_what_the_first_one_left() -> None:
    # p − q leaves (0, 0.3, 0.1), so token 1 has 3/4 now; drawn from the same q it is kept with min(1, 0.75 / 0.3) = 1.
    q, p = [[0.6, 0.3, 0.1]] * 2, [[0.2, 0.6, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    verified = blocks(100_000, [0, 1], q, p, parents=(-1, -1))
    assert set(map(tuple, verified.tokens.tolist())) == {(0, 0), (1, 2)}
    assert (verified.path == 0).double().mean().item() == pytest.approx(0.2 / 0.6, abs=0.006)  # 4 standard errors


def test_certain_siblings_are_kept_as_often_as_the_target_says_them() -> None:
    verified = blocks(100_000, [2, 0], None, [[0.5, 0.2, 0.3], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], parents=(-1, -1))
    first, second, neither = ((verified.path[:, 0] == node).double().mean().item() for node in (0, 1, -1))
    assert (first, second, neither) == pytest.approx((0.3, 0.5, 0.2), abs=0.007)
    assert verified.tokens[verified.num_accepted == 0].unique().tolist() == [-1, 1]


def test_what_is_expected_of_an_answer_by_hand() -> None:
    # Token 0 was said: a step goes past it with min(1, 0.2 / 0.4) and then keeps Σ min(p, q) = 0.9.
    said, p = torch.tensor([[0, 1]]), torch.tensor([[[0.4, 0.6], [0.5, 0.5]]])
    q = torch.tensor([[[0.2, 0.8], [0.6, 0.4]]])
    assert expected_accepted(said, q, p, Params()).item() == pytest.approx(0.8 + 0.5 * 0.9)
