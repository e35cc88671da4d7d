"""llama.cpp answers with the real target's own file, where `make baselines` has compiled it."""

import sys
from pathlib import Path

import pytest

from models.recipe import load_recipe
from models.sources import Message, Prompt
from models.targets import smollm2
from tasks.measure import llamacpp
from tasks.measure.llamacpp import SIDES, run_llamacpp, why_not


def test_it_is_said_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(llamacpp, "INTERPRETER", tmp_path / "python")
    assert why_not(load_recipe("smollm2-cpu")) == "it is not installed; `make baselines` compiles it"
    monkeypatch.setattr(llamacpp, "INTERPRETER", Path(sys.executable))
    assert why_not(load_recipe("smollm2-cpu")) is None
    assert why_not(load_recipe("tiny")) == "target random is not made of a GGUF file"


@pytest.mark.slow
def test_both_sides_answer_each_prompt_and_take_turns_at_being_the_first(tmp_path, bar):
    recipe = load_recipe("smollm2-cpu")
    if missing := why_not(recipe):
        pytest.skip(f"llama.cpp: {missing}")
    smollm2.tokenizer(smollm2.Params(name="smollm2")).save_pretrained(tmp_path / "target")
    prompts = [
        Prompt(messages=(Message(role="user", content=text),), domain="chat", group=text)
        for text in ("What is the capital of France?", "Count from one to five, twice.")
    ]
    found = run_llamacpp(recipe, tmp_path / "target", prompts, tmp_path, bar)
    assert [side for side, _ in found] == [*SIDES, *SIDES[::-1]]
    for prompt in prompts:
        plain, looked_up = ({side: a for side, a in found if a.prompt_id == prompt.id}[side] for side in SIDES)
        assert plain.token_ids[0] == looked_up.token_ids[0]  # what follows may part where two tokens are as good
        assert len(plain.arrival_ms) == plain.num_tokens == len(plain.token_ids) > 1
        assert list(plain.arrival_ms) == sorted(plain.arrival_ms)
