from pathlib import Path

import torch

from models.answers import mixed_requests
from models.core.drafting.draft_families import family_named
from models.core.learning.hidden import Sample
from models.core.learning.rollouts import Rollouts
from tests.models.drafts.tiny import make_tiny


def test_the_share_of_answers_is_as_asked_and_at_least_one() -> None:
    for share, wanted in ((0.5, 5), (0.24, 2), (0.01, 1)):
        params, rng = mixed_requests.Params(share=share), torch.Generator().manual_seed(0)
        drawn = [mixed_requests.by_draft([4] * 10, params, rng) for _ in range(2)]
        assert [sum(of is not None for of in writers) for writers in drawn] == [wanted] * 2
        assert all(of is None or of == [True] * 4 for writers in drawn for of in writers)
    assert drawn[0] != drawn[1]


def test_answers_that_the_draft_does_not_write_stay_as_they_are(tiny_target: Path, tmp_path: Path) -> None:
    samples = [Sample(str(number), "d", [5, 9, number], list(range(40, 52))) for number in range(3, 9)]
    params = mixed_requests.Params(share=0.5)
    rounds = Rollouts(make_tiny(family_named("eagle3"), tiny_target), tiny_target, samples, params, 3, tmp_path, 0)
    found = rounds.begin(0, "key", lambda *done: None).samples
    assert sum(one == sample for one, sample in zip(found, samples, strict=True)) == 3
    assert [one.prompt_ids for one in found] == [one.prompt_ids for one in samples]
    assert [one.completion_ids[0] for one in found] == [40] * 6
