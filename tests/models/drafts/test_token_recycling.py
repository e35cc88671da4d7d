from pathlib import Path

import numpy as np
import pytest
import torch

from models.drafts import token_recycling
from models.drafts.token_recycling import UNKNOWN, Params, recycle
from models.trees import Shape
from tests.models.drafts.answered import answer_all, prompts, repeated

BUSH = Shape(parents=(-1, -1, 0, 0, 1, 2), ranks=(0, 1, 0, 1, 0, 0))


def test_a_tree_is_filled_level_by_level_with_what_was_likely_after_each_token() -> None:
    candidates = np.full((10, 2), UNKNOWN)
    candidates[1], candidates[2], candidates[3], candidates[4] = (2, 3), (4, 5), (6, 7), (8, 9)
    #  1 → 2 (→ 4 (→ 8), 5) and 3 (→ 6)
    assert recycle(candidates, 1, BUSH) == ([2, 3, 4, 5, 6, 8], (-1, -1, 0, 0, 1, 2))


def test_below_a_token_that_was_never_read_nothing_is_drafted() -> None:
    candidates = np.full((10, 2), UNKNOWN)
    assert recycle(candidates, 1, BUSH) == ([], ())
    candidates[1], candidates[3] = (2, 3), (6, 7)
    assert recycle(candidates, 1, BUSH) == ([2, 3, 6], (-1, -1, 1))


def test_ranks_beyond_the_candidates_are_left_out() -> None:
    candidates = np.array([[UNKNOWN], [2], [0]])
    assert recycle(candidates, 1, BUSH) == ([2, 0], (-1, 0))


def test_rejected_tokens_teach_too_and_the_last_row_of_a_token_counts(tiny_target: Path) -> None:
    draft = token_recycling.create(Params(num_candidates=2), tiny_target, None)
    logits = torch.zeros(3, 259)
    logits[0, [7, 8]], logits[1, [9, 10]], logits[2, [12, 11]] = (torch.tensor([2.0, 1.0]) for _ in range(3))
    draft.drafter(20).observe(torch.tensor([4, 5, 4]), logits)
    assert draft.candidates[4].tolist() == [12, 11]
    assert draft.candidates[5].tolist() == [9, 10]
    assert (draft.candidates[[3, 6]] == UNKNOWN).all()


def test_the_matrix_of_the_default_target_is_below_two_megabytes(tiny_target: Path) -> None:
    draft = token_recycling.TokenRecycling(Params(), {"vocab_size": 49152})
    assert draft.candidates.nbytes < 2e6


def test_a_request_is_faster_when_it_comes_again(tiny_target: Path) -> None:
    draft = token_recycling.create(Params(), tiny_target, None)
    first, second = answer_all(tiny_target, draft, repeated(2), num_draft_tokens=8)
    assert first.token_ids == second.token_ids == answer_all(tiny_target, None, prompts(1))[0].token_ids
    assert len(second.drafted) < len(first.drafted)


def test_a_tree_that_follows_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="tree dynamic follows a draft's probabilities"):
        Params(tree={"name": "dynamic"})
