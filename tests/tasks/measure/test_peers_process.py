"""The peers' process on the two-layer target: every peer answers every prompt, with the same output."""

import pytest
from rich.progress import Progress

from models.sources import Message, Prompt
from tasks.measure.peers import Job, run_offline
from tasks.measure.run import Bar

SIDES = ["transformers", "transformers, prompt lookup", "reference engine", "reference engine without a draft"]


@pytest.mark.slow
def test_every_peer_answers_each_prompt_alike_and_another_one_is_first(tiny_target, tiny_draft, tmp_path):
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
    with Progress() as progress:
        answers = run_offline(job, tmp_path, Bar(progress, progress.add_task("", total=len(SIDES) * len(prompts))))
    assert [side for side, _ in answers] == [*SIDES, *SIDES[1:], SIDES[0]]
    for prompt in prompts:
        of = {side: answer for side, answer in answers if answer.prompt_id == prompt.id}
        assert len({answer.token_ids for answer in of.values()}) == 1
        counts = of["reference engine without a draft"].drafted_per_step
        assert counts is not None and sum(counts) == 0 < sum(of["reference engine"].drafted_per_step or ())
