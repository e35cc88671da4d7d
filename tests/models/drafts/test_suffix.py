from pathlib import Path

import pytest
import torch

from models.drafts import suffix
from tests.models.drafts.answered import answer_all, repeated

PARAMS = suffix.Params(shortest=2, longest=4, factor=1.0)


def propose(draft: suffix.Suffix, prompt: list[int], first: int, num_tokens: int = 6) -> list[int]:
    drafter = draft.drafter(64)
    drafter.extend(torch.tensor([*prompt, first]), torch.zeros(len(prompt), 0))
    return drafter.propose(num_tokens, None).token_ids[0].tolist()


@pytest.mark.parametrize(
    ("factor", "drafted"),
    [
        (1.0, [4, 9, 8]),  # a match of three tokens is worth three
        (0.1, [4]),  # and at least one
        (4.0, [4, 9, 8, 1, 2, 3]),  # the budget ends it
    ],
)
def test_a_longer_match_is_drafted_further(tiny_target: Path, factor: float, drafted: list[int]) -> None:
    draft = suffix.create(PARAMS.model_copy(update={"factor": factor}), tiny_target, None)
    assert propose(draft, [7, 1, 2, 3, 4, 9, 8, 1, 2], 3) == drafted


def test_an_answer_is_drafted_from_once_its_request_has_ended(tiny_target: Path) -> None:
    draft = suffix.create(PARAMS, tiny_target, None)
    first = draft.drafter(64)
    first.extend(torch.tensor([1, 2, 30]), torch.zeros(2, 0))
    first.extend(torch.tensor([30, 31, 32, 33]), torch.zeros(3, 0))
    assert propose(draft, [5, 6, 30], 31) == []
    first.end()
    assert propose(draft, [5, 6, 30], 31) == [32, 33]
    assert propose(draft, [9, 1], 2) == [30, 31]  # an answer's start is found by the prompt's end


def test_no_more_than_so_many_tokens_of_answers_are_remembered(tiny_target: Path) -> None:
    draft = suffix.create(PARAMS.model_copy(update={"remembered": 0}), tiny_target, None)
    drafter = draft.drafter(64)
    drafter.extend(torch.tensor([1, 2, 30, 31, 32]), torch.zeros(4, 0))
    drafter.end()
    assert propose(draft, [5, 6, 30], 31) == []


def test_a_repeated_request_is_drafted_from_the_first_answer(tiny_target: Path) -> None:
    draft = suffix.create(suffix.Params(), tiny_target, None)
    first, second = answer_all(tiny_target, draft, repeated(2), num_draft_tokens=8)
    assert first.token_ids == second.token_ids
    assert len(second.drafted) < len(first.drafted)
    assert max(second.accepted) > 1
