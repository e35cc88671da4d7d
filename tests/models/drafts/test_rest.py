from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from models.core.drafting.draft_families import open_draft
from models.drafts import rest, suffix
from tests.models.drafts.answered import answer_all, prompts

PARAMS = rest.Params(shortest=2, longest=4)


def holding(target: Path, *texts: list[int], params: rest.Params = PARAMS) -> rest.Rest:
    draft = rest.create(params, target, None)
    rest.collect(draft, texts)
    return draft


def test_continuations_of_the_longest_match_are_merged_into_a_tree(tiny_target: Path) -> None:
    draft = holding(tiny_target, [1, 2, 3, 4], [9, 1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 2, 7])
    #  after 1 2: twice 3 4, of which once 5; once 6 7. The latest place comes first among equals.
    assert draft.tree([0, 1, 2], 9) == ([3, 4, 6, 7, 5], (-1, 0, -1, 2, 1))
    assert draft.tree([0, 1, 2], 3) == ([3, 4, 6], (-1, 0, -1))
    assert draft.tree([1, 9, 1, 2], 9) == ([3, 4, 5], (-1, 0, 1))  # a longer match than that of 1 2
    assert draft.follow([0, 1, 2], 9) == [3, 4, 5]


def test_the_longest_match_and_the_commonest_continuation_are_found_however_far_back(tiny_target: Path) -> None:
    often = [[1, 2, 5, 6]] * 30
    draft = holding(tiny_target, [7, 1, 2, 3, 4], *often, *[[1, 2, 8, 9]] * 20)
    assert draft.tree([7, 1, 2], 2) == ([3, 4], (-1, 0))
    assert draft.tree([0, 1, 2], 2) == ([5, 6], (-1, 0))


def test_one_text_does_not_run_into_the_next(tiny_target: Path) -> None:
    draft = holding(tiny_target, [1, 2, 3], [4, 5, 6])
    assert draft.tree([1, 2], 4) == ([3], (-1,))
    assert draft.tree([3, 4], 4) == ([], ())


def test_an_empty_store_drafts_nothing_and_the_answer_is_the_plain_one(tiny_target: Path) -> None:
    draft = rest.create(PARAMS, tiny_target, None)
    (answer,) = answer_all(tiny_target, draft, prompts(1))
    assert set(answer.drafted) == {0}
    assert answer.token_ids == answer_all(tiny_target, None, prompts(1))[0].token_ids


def test_a_stored_answer_is_accepted_whole(tiny_target: Path) -> None:
    (plain,) = answer_all(tiny_target, None, prompts(1))
    draft = holding(tiny_target, [*plain.prompt_ids, *plain.token_ids], params=rest.Params())
    (answer,) = answer_all(tiny_target, draft, prompts(1), num_draft_tokens=5)
    assert answer.token_ids == plain.token_ids
    assert len(answer.drafted) == 4  # 23 tokens after the first, 6 a step


def test_a_store_survives_the_disk_and_is_cut_to_its_capacity(tiny_target: Path, tmp_path: Path) -> None:
    draft = holding(tiny_target, [1, 2, 3], [], [4, 5, 6], [7], params=PARAMS.model_copy(update={"capacity": 5}))
    assert draft.store.texts == [[1, 2, 3], [4, 5]]
    rest.save(draft, tmp_path)
    assert open_draft(tmp_path, tiny_target).store.texts == draft.store.texts


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "store.safetensors is missing"),
        ({"token_ids": torch.zeros(2, dtype=torch.int32)}, "must hold token_ids and lengths"),
        ({"token_ids": torch.zeros(2), "lengths": torch.ones(2)}, "both of one axis of int32"),
        ({"token_ids": torch.tensor([1, 2]).int(), "lengths": torch.tensor([3]).int()}, "2 tokens for texts of 3"),
        ({"token_ids": torch.tensor([300]).int(), "lengths": torch.tensor([1]).int()}, "tokens outside of 0 to 258"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(
    tiny_target: Path, tmp_path: Path, tensors: dict[str, torch.Tensor] | None, message: str
) -> None:
    rest.save(holding(tiny_target, [1, 2]), tmp_path)
    (tmp_path / rest.STORE).unlink()
    if tensors is not None:
        save_file(tensors, tmp_path / rest.STORE)
    with pytest.raises(ValueError, match=message):
        open_draft(tmp_path, tiny_target)


def test_a_text_of_another_vocabulary_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="token 259 is not one of the vocabulary, 0 to 258"):
        holding(tiny_target, [1, 259])


@pytest.mark.parametrize("family", [rest, suffix])
def test_impossible_sizes_are_refused(family: ModuleType) -> None:
    with pytest.raises(ValueError, match="wanted shortest ≤ longest; got 5 and 4"):
        family.Params(shortest=5, longest=4)
