"""The baselines without an endpoint, on the two-layer target: they say the same, and tell when they said it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from models.sources import Message, Prompt
from tasks.measure.baselines import Baseline, Job, encoder, open_baselines, run_offline

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def baselines(tiny_target: Path, tiny_draft: Path) -> Mapping[str, Baseline]:
    return open_baselines(tiny_target, tiny_draft, "float32", num_draft_tokens=3, max_model_len=256)


def test_every_baseline_gives_the_targets_own_output(baselines: Mapping[str, Baseline], tiny_target: Path) -> None:
    prompt = Prompt(messages=(Message(role="user", content="what is 3 times 4?"),), domain="chat", group="g")
    ids = encoder(tiny_target)(prompt)
    answers = {name: baseline(ids, NUM_TOKENS) for name, baseline in baselines.items()}
    assert "reference engine without a draft" in answers
    assert len({answer.token_ids for answer in answers.values()}) == 1
    assert 0 < len(answers["transformers"].token_ids) <= NUM_TOKENS


def test_arrivals_are_one_a_token_and_in_order(baselines: Mapping[str, Baseline]) -> None:
    for name in ("transformers", "transformers, prompt lookup"):
        answer = baselines[name]([7, 30, 12, 7, 30, 12], NUM_TOKENS)
        assert len(answer.arrival_ms) == len(answer.token_ids)
        assert list(answer.arrival_ms) == sorted(answer.arrival_ms)
        assert 0 < answer.first_token_ms == answer.arrival_ms[0]
        assert answer.seconds == pytest.approx(answer.arrival_ms[-1] / 1000)


def test_prompt_lookup_hands_over_several_tokens_at_once(baselines: Mapping[str, Baseline]) -> None:
    answer = baselines["transformers, prompt lookup"]([7, 30, 12] * 8, NUM_TOKENS)
    assert len(set(answer.arrival_ms)) < len(answer.token_ids)


def test_the_reference_engine_counts_its_steps_and_drafts_in_none_without_a_draft(
    baselines: Mapping[str, Baseline],
) -> None:
    with_draft, without = (
        baselines[name]([7, 30, 12, 7, 30, 12], NUM_TOKENS)
        for name in ("reference engine", "reference engine without a draft")
    )
    assert sum(with_draft.drafted_per_step or ()) > 0
    assert without.drafted_per_step == without.accepted_per_step == (0,) * (len(without.token_ids) - 1)
    assert 0 < without.first_token_ms < 1000 * without.seconds


SIDES = ["transformers", "transformers, prompt lookup", "reference engine", "reference engine without a draft"]


@pytest.mark.slow
def test_every_baseline_answers_each_prompt_alike_and_another_one_is_first(tiny_target, tiny_draft, tmp_path, bar):
    prompts = tuple(
        Prompt(messages=(Message(role="user", content=text),), domain="chat", group=text)
        for text in ("what is 3 times 4?", "and 5 times 6?")
    )
    job = Job(
        target_dir=tiny_target,
        draft_dir=tiny_draft,
        dtype="float32",
        num_draft_tokens=2,
        max_model_len=256,
        max_tokens=12,
        prompts=prompts,
        answers=tmp_path / "answers.jsonl",
    )
    answers = run_offline(job, tmp_path, bar)
    assert [side for side, _ in answers] == [*SIDES, *SIDES[1:], SIDES[0]]
    for prompt in prompts:
        of = {side: answer for side, answer in answers if answer.prompt_id == prompt.id}
        assert len({answer.token_ids for answer in of.values()}) == 1
        counts = of["reference engine without a draft"].drafted_per_step
        assert counts is not None and sum(counts) == 0 < sum(of["reference engine"].drafted_per_step or ())
