from pathlib import Path

import numpy as np
import pytest

from models.answers import rejected, token_counts
from models.core.evaluation.acceptance import rejected_places
from models.core.learning.hidden import Sample
from models.drafts import eagle3
from models.engines import Sampling
from tests.models.drafts.answered import answer_all, prompts


def test_a_refused_place_counts_more_by_hand() -> None:
    samples = [Sample("a", "d", [1], [7, 8, 9], rejected=[2]), Sample("b", "d", [1], [7, 8, 9])]
    # Places 1 and 2 of both: 0.25, 1, 0.25, 0.25 with a mean of 7/16.
    weights = rejected.weigh(samples, rejected.Params(others=0.25))
    assert weights[0][1:] == pytest.approx([4 / 7, 16 / 7])
    assert weights[1][1:] == pytest.approx([4 / 7, 4 / 7])
    assert rejected.weigh(samples, rejected.Params(others=0))[0][1:] == [0, 4]
    assert rejected.weigh(samples, rejected.Params(others=1)) == [[1, 1, 1]] * 2
    counts = token_counts([samples[0]._replace(prompt_ids=[1, 2], rejected=[1])], rejected.Params(others=0))
    assert counts["a"].tolist() == [0, 0, 0, 2, 0]  # a prompt counts nothing of its own


def test_places_outside_of_an_answer_and_a_log_without_refusals_are_refused() -> None:
    for place in (0, 3):
        with pytest.raises(ValueError, match=rf"answer a has 3 tokens and refusals at \[{place}\]; wanted 1 to 2"):
            rejected.weigh([Sample("a", "d", [1], [7, 8, 9], rejected=[place])], rejected.Params())
    unknown = [Sample("a", "d", [1], [7, 8, 9])]
    with pytest.raises(ValueError, match="names no refused token in 1 answers; there is nothing to learn"):
        rejected.weigh(unknown, rejected.Params(others=0))
    assert rejected.weigh(unknown, rejected.Params()) == [[1, 1, 1]]


@pytest.mark.slow
def test_refused_places_are_those_where_the_engine_emitted_another_token(tiny_target: Path) -> None:
    draft = eagle3.create(eagle3.Params(vocab_size=128), tiny_target, np.ones(259))
    found = 0
    for sampling in (Sampling(max_tokens=24, ignore_eos=True), Sampling(max_tokens=24, temperature=1.0, seed=1)):
        for answer in answer_all(tiny_target, draft, prompts(4), sampling):
            places = rejected_places(answer.drafted, answer.accepted, answer.matches, len(answer.token_ids))
            drafted: dict[int, int] = {}
            start = 1
            for step, accepted in zip(answer.drafted_ids, answer.accepted, strict=True):
                drafted |= dict(enumerate(step, start))
                if start + accepted < len(answer.token_ids):
                    assert (start + accepted in places) == (accepted < len(step))
                start += accepted + 1
            assert all(drafted[place] != answer.token_ids[place] for place in places)
            found += len(places)
    assert found > 20
