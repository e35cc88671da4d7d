"""Answers of the log: where the draft was refused counts more, and is learnt first."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.answers import rejected, token_counts
from models.core.evaluation.acceptance import rejected_places
from models.core.learning import distill
from models.core.learning.hidden import Sample, hidden_states, pack
from models.drafts import eagle3
from models.engines import Sampling
from tests.models import planted
from tests.models.drafts.answered import answer_all, prompts

HARD = {planted.FIRST + value for value in (5, 11, 23, 31, 47)}  # after these the planted log has refusals


def test_a_refused_place_counts_more_by_hand() -> None:
    samples = [Sample("a", "d", [1], [7, 8, 9], rejected=[2]), Sample("b", "d", [1], [7, 8, 9])]
    # Places 1 and 2 of both: 0.25, 1, 0.25, 0.25 with a mean of 7/16.
    weights = rejected.weigh(samples, rejected.Params(others=0.25))
    assert weights[0][1:] == pytest.approx([4 / 7, 16 / 7])
    assert weights[1][1:] == pytest.approx([4 / 7, 4 / 7])
    assert rejected.weigh(samples, rejected.Params(others=0))[0][1:] == [0, 4]
    assert rejected.weigh(samples, rejected.Params(others=1)) == [[1, 1, 1]] * 2


def test_a_prompt_counts_nothing_of_its_own() -> None:
    sample = Sample("a", "d", [1, 2], [7, 8, 9], rejected=[1])
    assert token_counts([sample], rejected.Params(others=0))["a"].tolist() == [0, 0, 0, 2, 0]


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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    planted.build(directory)
    return directory


@pytest.mark.slow
def test_a_draft_learns_first_what_the_log_says_was_refused(target: Path, tmp_path: Path) -> None:
    """After five of 63 tokens every draft was refused; so few steps teach a draft that weighs alike less of them."""
    learnt = [_refused_after_hard(one) for one in planted.answers(target, 24, 1.0, seed=0)]
    held_out = [_refused_after_hard(one) for one in planted.answers(target, 12, 1.0, seed=1)]
    said = {}
    for name, others in (("alike", 1.0), ("refused", 0.05)):
        draft = eagle3.create(eagle3.Params(vocab_size=70), target, np.ones(259))
        params = distill.Params(
            num_epochs=4,
            batch_tokens=256,
            learning_rate=2e-3,
            num_threads=1,
            answers={"name": "rejected", "others": others},
        )
        distill.train(draft, target, learnt, params, 2, tmp_path / name)
        said[name] = _mass_on_what_may_come(draft, target, held_out, tmp_path)
    assert said["refused"] > 1.2 * said["alike"], said


def _refused_after_hard(sample: Sample) -> Sample:
    places = [place for place, before in enumerate(sample.completion_ids[:-1], 1) if before in HARD]
    return sample._replace(rejected=places)


def _mass_on_what_may_come(draft: eagle3.Eagle3, target: Path, samples: list[Sample], work: Path) -> float:
    """Return the draft's mean probability of the two tokens that the target may say, at refused places."""
    states = hidden_states(draft, target, samples, work)
    masses = []
    with torch.inference_mode():
        for sample in samples:
            rows, *_ = pack([sample], states, 1, draft)
            q = draft.unroll(rows, 1)[0].logits.softmax(-1)
            for place in sample.rejected or ():
                before = sample.completion_ids[place - 1] - planted.FIRST
                may_come = [planted.FIRST + (2 * before + added) % planted.NUM for added in (0, 1)]
                masses.append(sum(float(q[place - 1, draft.vocabulary == token]) for token in may_come))
    assert len(masses) > 10
    return sum(masses) / len(masses)
