"""Families that look up what to draft, or take it from what the target said: `ngram`, `suffix`, `rest` and others."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.core.drafting.draft_families import open_draft
from models.core.evaluation.scoring import score
from models.core.learning.hidden import Sample
from models.drafts import jacobi, ngram, rest, suffix, token_recycling
from models.drafts.token_recycling import UNKNOWN, recycle
from models.trees import Shape
from tests.models.drafts.answered import answer_all, prompts, repeated

ENDINGS = ngram.Params(min_tokens=2, max_tokens=3)
SUFFIXES = suffix.Params(shortest=2, longest=4, factor=1.0)
STORED = rest.Params(shortest=2, longest=4)
BUSH = Shape(parents=(-1, -1, 0, 0, 1, 2), ranks=(0, 1, 0, 1, 0, 0))


@pytest.mark.parametrize(
    ("token_ids", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),  # the ending 1 2 3 stood at the start
        ([1, 2, 5, 1, 2, 6, 1, 2], [5, 1, 2]),  # of two places the first
        ([7, 1, 2, 8, 9, 5, 1, 2, 7, 1, 2], [8, 9, 5]),  # three tokens win over two that stand nearer
        ([4, 1, 2, 3], []),  # nothing stood before
        ([3, 3], []),  # one token is below the least
        ([5, 5, 5, 5], [5]),  # a place may overlap with the ending
        ([], []),
    ],
)
def test_what_followed_the_longest_known_ending_is_drafted(token_ids: list[int], drafted: list[int]) -> None:
    assert ngram.look_up(token_ids, 3, ENDINGS) == drafted


def test_a_repeating_answer_is_accepted_and_a_fresh_one_is_not(tiny_target: Path, tmp_path: Path) -> None:
    draft = ngram.create(ENDINGS, tiny_target, None)
    loops = Sample("loops", "d", [3, 4, 5, 6], [7, 8, 9] * 8)
    fresh = Sample("fresh", "d", [3, 4, 5, 6], list(range(100, 124)))
    looping, new = score(draft, tiny_target, [loops, fresh], 3, tmp_path)
    assert (new.steps, new.accepted) == (23, 0)
    # Four steps until an ending is known that stood before, then 4 tokens a step, and 3 in the last.
    assert (looping.steps, looping.accepted) == (9, 15)


def test_a_directory_of_ngram_without_its_settings_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    ngram.save(ngram.create(ENDINGS, tiny_target, None), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "ngram": None}))
    with pytest.raises(ValueError, match='config.json has "ngram" None; wanted its settings'):
        ngram.load(tmp_path, tiny_target)


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
    draft = suffix.create(SUFFIXES.model_copy(update={"factor": factor}), tiny_target, None)
    assert propose(draft, [7, 1, 2, 3, 4, 9, 8, 1, 2], 3) == drafted


def test_an_answer_is_drafted_from_once_its_request_has_ended(tiny_target: Path) -> None:
    draft = suffix.create(SUFFIXES, tiny_target, None)
    first = draft.drafter(64)
    first.extend(torch.tensor([1, 2, 30]), torch.zeros(2, 0))
    first.extend(torch.tensor([30, 31, 32, 33]), torch.zeros(3, 0))
    assert propose(draft, [5, 6, 30], 31) == []
    first.end()
    assert propose(draft, [5, 6, 30], 31) == [32, 33]
    assert propose(draft, [9, 1], 2) == [30, 31]  # an answer's start is found by the prompt's end


def test_no_more_than_so_many_tokens_of_answers_are_remembered(tiny_target: Path) -> None:
    draft = suffix.create(SUFFIXES.model_copy(update={"remembered": 0}), tiny_target, None)
    drafter = draft.drafter(64)
    drafter.extend(torch.tensor([1, 2, 30, 31, 32]), torch.zeros(4, 0))
    drafter.end()
    assert propose(draft, [5, 6, 30], 31) == []


def holding(target: Path, *texts: list[int], params: rest.Params = STORED) -> rest.Rest:
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
    draft = rest.create(STORED, tiny_target, None)
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
    draft = holding(tiny_target, [1, 2, 3], [], [4, 5, 6], [7], params=STORED.model_copy(update={"capacity": 5}))
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
def test_a_store_that_does_not_fit_is_refused(tiny_target, tmp_path, tensors, message) -> None:
    rest.save(holding(tiny_target, [1, 2]), tmp_path)
    (tmp_path / rest.STORE).unlink()
    if tensors is not None:
        save_file(tensors, tmp_path / rest.STORE)
    with pytest.raises(ValueError, match=message):
        open_draft(tmp_path, tiny_target)


def test_a_text_of_another_vocabulary_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="token 259 is not one of the vocabulary, 0 to 258"):
        holding(tiny_target, [1, 259])


@pytest.mark.parametrize(
    ("family", "sizes", "fault"),
    [
        (ngram, {"min_tokens": 0, "max_tokens": 3}, "1 ≤ min_tokens ≤ max_tokens"),
        (ngram, {"min_tokens": 4, "max_tokens": 3}, "1 ≤ min_tokens ≤ max_tokens"),
        (rest, {"shortest": 5, "longest": 4}, "wanted shortest ≤ longest; got 5 and 4"),
        (suffix, {"shortest": 5, "longest": 4}, "wanted shortest ≤ longest; got 5 and 4"),
    ],
)
def test_impossible_sizes_are_refused(family: ModuleType, sizes: dict[str, int], fault: str, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=fault):
        family.create(family.Params(**sizes), tiny_target, None)


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
    draft = token_recycling.create(token_recycling.Params(num_candidates=2), tiny_target, None)
    logits = torch.zeros(3, 259)
    logits[0, [7, 8]], logits[1, [9, 10]], logits[2, [12, 11]] = (torch.tensor([2.0, 1.0]) for _ in range(3))
    draft.drafter(20).observe(torch.tensor([4, 5, 4]), logits)
    assert draft.candidates[4].tolist() == [12, 11]
    assert draft.candidates[5].tolist() == [9, 10]
    assert (draft.candidates[[3, 6]] == UNKNOWN).all()


@pytest.mark.parametrize("family", [suffix, token_recycling])
def test_a_request_is_faster_when_it_comes_again(tiny_target: Path, family: ModuleType) -> None:
    draft = family.create(family.Params(), tiny_target, None)
    first, second = answer_all(tiny_target, draft, repeated(2), num_draft_tokens=8)
    assert first.token_ids == second.token_ids == answer_all(tiny_target, None, prompts(1))[0].token_ids
    assert len(second.drafted) < len(first.drafted)
    assert max(second.accepted) > 1


def test_a_tree_that_follows_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="tree dynamic follows a draft's probabilities"):
        token_recycling.Params(tree={"name": "dynamic"})


def said(*tokens: int) -> Tensor:
    """[n, 10] logits by which each of these tokens is likeliest."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float()


def greedily(logits: Tensor) -> tuple[int, None]:
    return int(logits.argmax()), None


def proposed(drafter: "jacobi._Drafter", num_tokens: int) -> list[int]:
    return drafter.propose(num_tokens, greedily).token_ids[0].tolist()


def test_what_the_target_said_after_wrong_guesses_is_guessed_next(tiny_target: Path) -> None:
    drafter = jacobi.create(jacobi.Params(), tiny_target, None).drafter(20)
    drafter.observe(torch.tensor([3]), said(4))
    drafter.extend(torch.tensor([1, 2, 3, 4]), torch.zeros(3, 0))
    assert proposed(drafter, 3) == [4, 4, 4]  # no place was reached yet
    # Of 4 | 4 4 4 the target says 5 | 6 7 8: nothing is accepted, 5 is emitted.
    drafter.observe(torch.tensor([4, 4, 4, 4]), said(5, 6, 7, 8))
    drafter.extend(torch.tensor([4, 5]), torch.zeros(1, 0))
    assert proposed(drafter, 3) == [6, 7, 8]
    # Of 5 | 6 7 8 it says 6 | 9 1 2: one is accepted, 9 is emitted, and of the two places left the last is repeated.
    drafter.observe(torch.tensor([5, 6, 7, 8]), said(6, 9, 1, 2))
    drafter.extend(torch.tensor([5, 6, 9]), torch.zeros(2, 0))
    assert proposed(drafter, 3) == [1, 2, 2]


def test_the_iteration_ends_in_the_targets_own_text_within_a_step_a_token(tiny_target: Path) -> None:
    """A fixed point of the guesses is the target's greedy text, so it never takes more steps than decoding plainly."""
    draft = jacobi.create(jacobi.Params(), tiny_target, None)
    plain = answer_all(tiny_target, None, prompts(6))
    found = answer_all(tiny_target, draft, prompts(6), num_draft_tokens=5)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert sum(len(one.drafted) for one in found) < sum(len(one.drafted) for one in plain)
