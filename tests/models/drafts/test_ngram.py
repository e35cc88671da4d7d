import json
from pathlib import Path

import pytest

from models.core.evaluation.scoring import score
from models.core.learning.hidden import Sample
from models.drafts import ngram

PARAMS = ngram.Params(min_tokens=2, max_tokens=3)


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
    assert ngram.look_up(token_ids, 3, PARAMS) == drafted


def test_a_repeating_answer_is_accepted_and_a_fresh_one_is_not(tiny_target: Path, tmp_path: Path) -> None:
    draft = ngram.create(PARAMS, tiny_target, None)
    loops = Sample("loops", "d", [3, 4, 5, 6], [7, 8, 9] * 8)
    fresh = Sample("fresh", "d", [3, 4, 5, 6], list(range(100, 124)))
    looping, new = score(draft, tiny_target, [loops, fresh], 3, tmp_path)
    assert (new.steps, new.accepted) == (23, 0)
    # Four steps until an ending is known that stood before, then 4 tokens a step, and 3 in the last.
    assert (looping.steps, looping.accepted) == (9, 15)


def test_a_directory_without_its_settings_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    ngram.save(ngram.create(PARAMS, tiny_target, None), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "ngram": None}))
    with pytest.raises(ValueError, match='config.json has "ngram" None; wanted its settings'):
        ngram.load(tmp_path, tiny_target)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3)])
def test_impossible_sizes_are_refused(tiny_target: Path, least: int, most: int) -> None:
    with pytest.raises(ValueError, match="1 ≤ min_tokens ≤ max_tokens"):
        ngram.create(ngram.Params(min_tokens=least, max_tokens=most), tiny_target, None)
