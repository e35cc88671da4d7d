"""`spec_reason` and `speculative_thinking` by hand: which model writes which step."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.engines import Sampling
from models.reasoning import spec_reason, speculative_thinking
from tests.models.reasoning.thinking import PROMPT, alone, think, vocabulary, written

EVERYTHING = (*map(chr, range(32, 127)), "\ufffd")
# Greedily the tiny models say the same over and over, and no step ever ends.
DRAWN = Sampling(temperature=1.0, seed=3)
NO_CUE = {"affirms": (), "reflects": (), "verifies": ()}


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
def test_of_a_threshold_that_nothing_or_all_steps_reach_one_model_answers(small, tiny_target, threshold, by) -> None:
    steps = think(small, tiny_target, spec_reason.Params(threshold=threshold))
    assert written(steps) == alone({"target": tiny_target, "small": small}[by])
    assert all(step.by == by and (step.given_up > 0) == (by == "target") for step in steps)


def test_by_spec_reason_the_first_steps_are_the_targets_unasked(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, spec_reason.Params(threshold=0, num_first=2))
    assert [(step.by, step.score, step.given_up) for step in steps[:2]] == [("target", None, 0)] * 2
    assert {step.by for step in steps[2:]} == {"small"}


@pytest.mark.slow
def test_by_spec_reason_a_step_is_kept_from_the_score_on_that_the_target_says_next(small: Path, judge: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    words, text = vocabulary(judge), [*PROMPT]
    kept = think(small, judge, spec_reason.Params(threshold=0, max_step_tokens=6))
    for step in kept:
        text += step.token_ids
        with torch.inference_mode():
            said = model(torch.tensor([[*text, *words.ids(spec_reason.QUESTION)]])).logits[0, -1].argmax()
        digit = words.text([int(said)])
        assert (step.by, step.score) == ("small", int(digit) if digit else 0)
    first = kept[0].score
    assert first is not None and first > 0
    assert think(small, judge, spec_reason.Params(threshold=first, max_step_tokens=6))[0] == kept[0]
    taken = think(small, judge, spec_reason.Params(threshold=first + 1, max_step_tokens=6))[0]
    assert (taken.by, taken.score, taken.given_up) == ("target", first, len(kept[0].token_ids))


def test_what_is_no_digit_is_a_score_of_0(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, spec_reason.Params(threshold=1))
    assert {step.score for step in steps if step.by == "target"} == {0}


def test_where_there_is_no_room_to_ask_the_target_writes(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, spec_reason.Params(threshold=0), max_model_len=len(PROMPT) + 60)
    assert written(steps) == alone(tiny_target)
    assert all((step.by, step.score) == ("target", None) and step.given_up for step in steps)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("So x is 3.", 0),
        ("Yes, I am CONFIDENT.", 1),
        ("Wait, is it?", -1),
        ("Yes. But wait.", -1),
        ("Yes, yes; let me check.", 1),
        ("Let me verify that.", -1),
        ("", 0),
    ],
)
def test_a_text_leans_by_its_cues_and_turns_back_where_they_are_even(text: str, wanted: int) -> None:
    assert speculative_thinking.leaning(text, speculative_thinking.Params()) == wanted


def test_without_cues_the_answer_is_the_small_models(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, speculative_thinking.Params(**NO_CUE))
    assert written(steps) == alone(small)
    assert {step.by for step in steps} == {"small"}


def test_at_a_cue_the_target_begins_the_step_and_what_the_small_model_began_is_given_up(small, tiny_target) -> None:
    params = speculative_thinking.Params(**NO_CUE | {"affirms": EVERYTHING}, takeover_tokens=5)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    taken = [step for step in steps if step.by == "target"]
    assert taken and all(0 < step.given_up <= 5 and len(step.token_ids) <= 5 for step in taken)
    words = vocabulary(tiny_target)
    for before, step in pairwise(steps):
        if step.by == "target":
            assert before.token_ids[-1] in words.step_ends


def test_where_the_targets_beginning_leans_alike_it_can_be_given_up_instead(small: Path, tiny_target: Path) -> None:
    params = speculative_thinking.Params(**NO_CUE | {"affirms": EVERYTHING}, keeps_target=False)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    assert len(steps) > 3
    assert {(step.by, step.given_up) for step in steps} == {("small", 0)}


def test_a_check_that_is_begun_the_target_goes_on_with(small: Path, tiny_target: Path) -> None:
    params = speculative_thinking.Params(**NO_CUE | {"verifies": EVERYTHING}, takeover_tokens=4, check_tokens=11)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    begun = next(number for number, step in enumerate(steps) if step.given_up)
    assert [step.by for step in steps[begun : begun + 2]] == ["target", "target"]
    assert len(steps[begun + 1].token_ids) == 11


def test_when_too_many_steps_have_turned_back_the_target_recaps_behind_a_sentence_of_ours(small, tiny_target) -> None:
    params = speculative_thinking.Params(
        **NO_CUE | {"reflects": EVERYTHING}, takeover_tokens=3, recap_after=1, recap_text="Check:", recap_tokens=8
    )
    steps, asked = think(small, tiny_target, params, sampling=DRAWN), vocabulary(tiny_target).ids("Check:")
    put_in = [number for number, step in enumerate(steps) if step.token_ids == asked]
    assert put_in
    recap = steps[put_in[0] + 1]
    assert (recap.by, len(recap.token_ids)) == ("target", 8)
