from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.reasoning.spec_reason import QUESTION, Params
from tests.models.reasoning.thinking import PROMPT, alone, think, vocabulary, written


@pytest.fixture(scope="module")
def judge(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says digits alone."""
    directory = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32, tie_word_embeddings=False)
    digits = tokenizer.encode("0123456789", add_special_tokens=False)
    rows = model.get_input_embeddings().weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(rows))
    with torch.no_grad():
        model.lm_head.weight[digits] = rows[digits]
    model.config.tie_word_embeddings = False
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "by"), [(10, "target"), (0, "small")])
def test_of_a_threshold_that_nothing_or_all_reach_the_answer_is_one_models(small, tiny_target, threshold, by) -> None:
    steps = think(small, tiny_target, Params(threshold=threshold))
    assert written(steps) == alone({"target": tiny_target, "small": small}[by])
    assert all(step.by == by and (step.given_up > 0) == (by == "target") for step in steps)


def test_the_first_steps_are_the_targets_unasked(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, Params(threshold=0, num_first=2))
    assert [(step.by, step.score, step.given_up) for step in steps[:2]] == [("target", None, 0)] * 2
    assert {step.by for step in steps[2:]} == {"small"}


@pytest.mark.slow
def test_a_step_is_kept_from_the_score_on_that_the_target_says_next(small: Path, judge: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    words, text = vocabulary(judge), [*PROMPT]
    kept = think(small, judge, Params(threshold=0, max_step_tokens=6))
    for step in kept:
        text += step.token_ids
        with torch.inference_mode():
            said = model(torch.tensor([[*text, *words.ids(QUESTION)]])).logits[0, -1].argmax()
        digit = words.text([int(said)])
        assert (step.by, step.score) == ("small", int(digit) if digit else 0)
    first = kept[0].score
    assert first is not None and first > 0
    assert think(small, judge, Params(threshold=first, max_step_tokens=6))[0] == kept[0]
    taken = think(small, judge, Params(threshold=first + 1, max_step_tokens=6))[0]
    assert (taken.by, taken.score, taken.given_up) == ("target", first, len(kept[0].token_ids))


def test_what_is_no_digit_is_a_score_of_0(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, Params(threshold=1))
    assert {step.score for step in steps if step.by == "target"} == {0}


def test_where_there_is_no_room_to_ask_the_target_writes(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, Params(threshold=0), max_model_len=len(PROMPT) + 60)
    assert written(steps) == alone(tiny_target)
    assert all((step.by, step.score) == ("target", None) and step.given_up for step in steps)
