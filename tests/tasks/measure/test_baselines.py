"""The baselines without an endpoint: on the two-layer target they say the same, and tell when they said it.

llama.cpp answers with the real target's own file, where `make baselines` has compiled it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from models.recipe import load_recipe
from models.sources import Message, Prompt
from models.targets import smollm2
from tasks.measure import baselines as module
from tasks.measure.baselines import SIDES, Baseline, Job, open_baselines, run_llamacpp, run_offline, why_not

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def baselines(tiny_target: Path, tiny_draft: Path) -> Mapping[str, Baseline]:
    return open_baselines(tiny_target, tiny_draft, "float32", num_draft_tokens=3, max_model_len=256)


def test_arrivals_are_one_a_token_and_in_order_and_prompt_lookup_hands_over_several_at_once(
    baselines: Mapping[str, Baseline],
) -> None:
    for name in ("transformers", "transformers, prompt lookup"):
        answer = baselines[name]([7, 30, 12] * 8, NUM_TOKENS)
        assert len(answer.arrival_ms) == len(answer.token_ids)
        assert list(answer.arrival_ms) == sorted(answer.arrival_ms)
        assert 0 < answer.first_token_ms == answer.arrival_ms[0]
        assert answer.seconds == pytest.approx(answer.arrival_ms[-1] / 1000)
    assert len(set(answer.arrival_ms)) < len(answer.token_ids)


OFFLINE = ["transformers", "transformers, prompt lookup", "reference engine", "reference engine without a draft"]


@pytest.mark.slow
def test_every_baseline_answers_each_prompt_alike_and_another_one_is_first(tiny_target, tiny_draft, tmp_path, bar):
    prompts = prompts_of("what is 3 times 4?", "and 5 times 6?")
    sizes = {"num_draft_tokens": 2, "max_model_len": 256, "max_tokens": 12}
    files = {"target_dir": tiny_target, "draft_dir": tiny_draft, "answers": tmp_path / "answers.jsonl"}
    answers = run_offline(Job(dtype="float32", prompts=prompts, **sizes, **files), tmp_path, bar)
    assert [answer["side"] for answer in answers] == [*OFFLINE, *OFFLINE[1:], OFFLINE[0]]
    for prompt in prompts:
        of = {answer["side"]: answer for answer in answers if answer["prompt_id"] == prompt.id}
        assert len({tuple(answer["token_ids"]) for answer in of.values()}) == 1
        assert {(answer["domain"], answer["status"]) for answer in of.values()} == {("chat", "ok")}
        counts = of["reference engine without a draft"]["drafted_per_step"]
        assert counts is not None and sum(counts) == 0 < sum(of["reference engine"]["drafted_per_step"])


def test_it_is_said_what_is_missing_of_llamacpp(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "INTERPRETER", tmp_path / "python")
    assert why_not(load_recipe("smollm2-cpu")) == "it is not installed; `make baselines` compiles it"
    monkeypatch.setattr(module, "INTERPRETER", Path(sys.executable))
    assert why_not(load_recipe("smollm2-cpu")) is None
    assert why_not(load_recipe("tiny")) == "target random is not made of a GGUF file"


@pytest.mark.slow
def test_both_sides_of_llamacpp_answer_each_prompt_and_take_turns_at_being_the_first(tmp_path, bar):
    recipe = load_recipe("smollm2-cpu")
    if missing := why_not(recipe):
        pytest.skip(f"llama.cpp: {missing}")
    smollm2.tokenizer(smollm2.Params(name="smollm2")).save_pretrained(tmp_path / "target")
    prompts = prompts_of("What is the capital of France?", "Count from one to five, twice.")
    found = run_llamacpp(recipe, tmp_path / "target", prompts, tmp_path, bar)
    assert [answer["side"] for answer in found] == [*SIDES, *SIDES[::-1]]
    for prompt in prompts:
        of = {answer["side"]: answer for answer in found if answer["prompt_id"] == prompt.id}
        plain, looked_up = (of[side] for side in SIDES)
        assert plain["token_ids"][0] == looked_up["token_ids"][0]  # what follows may part where two tokens are as good
        assert len(plain["arrival_ms"]) == plain["num_tokens"] == len(plain["token_ids"]) > 1
        assert plain["first_token_ms"] == plain["arrival_ms"][0]
        assert plain["arrival_ms"] == sorted(plain["arrival_ms"])


def prompts_of(*texts: str) -> tuple[Prompt, ...]:
    return tuple(Prompt(messages=(Message(role="user", content=text),), domain="chat", group=text) for text in texts)
