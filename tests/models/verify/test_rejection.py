"""Speculative sampling, by hand."""

import pytest
import torch

from models.verify.rejection import Params, verify


def blocks(count: int, draft: list[int], q: list[list[float]], p: list[list[float]], dtype=torch.float32):
    """Verify the same block `count` times."""
    return verify(
        torch.tensor([draft] * count),
        torch.tensor([q] * count, dtype=dtype),
        torch.tensor([p] * count, dtype=dtype),
        torch.Generator().manual_seed(0),
        Params(),
    )


def test_a_token_is_kept_as_often_as_p_over_q() -> None:
    # 0.2 / 0.8 = 1/4 is kept; what is left of p - q is all on token 1.
    verified = blocks(100_000, [0], q=[[0.8, 0.2, 0.0]], p=[[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]])
    assert verified.num_accepted.double().mean().item() == pytest.approx(0.25, abs=0.006)  # 4 standard errors
    assert set(map(tuple, verified.tokens.tolist())) == {(0, 2), (1, -1)}


def test_a_token_that_p_likes_better_is_always_kept() -> None:
    verified = blocks(1000, [1], q=[[0.5, 0.5]], p=[[0.4, 0.6], [1.0, 0.0]])
    assert verified.tokens.tolist() == [[1, 0]] * 1000


def test_a_token_that_p_excludes_is_never_kept() -> None:
    verified = blocks(1000, [0, 1], q=[[0.5, 0.5], [0.5, 0.5]], p=[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert verified.tokens.tolist() == [[1, -1, -1]] * 1000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_taken(dtype: torch.dtype) -> None:
    verified = blocks(10, [0], q=[[1.0, 0.0]], p=[[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    assert verified.tokens.tolist() == [[0, 1]] * 10


def test_a_token_that_the_draft_could_not_have_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no probability"):
        blocks(1, [1], q=[[1.0, 0.0]], p=[[0.5, 0.5], [0.5, 0.5]])
