from itertools import pairwise
from pathlib import Path

import pytest

from models.engines import Sampling
from models.reasoning.speculative_thinking import Params, leaning
from tests.models.reasoning.thinking import alone, think, vocabulary, written

EVERYTHING = (*map(chr, range(32, 127)), "\ufffd")
# Greedily the tiny models say the same over and over, and no step ever ends.
DRAWN = Sampling(temperature=1.0, seed=3)
NO_CUE = {"affirms": (), "reflects": (), "verifies": ()}


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
    assert leaning(text, Params()) == wanted


def test_without_cues_the_answer_is_the_small_models(small: Path, tiny_target: Path) -> None:
    steps = think(small, tiny_target, Params(**NO_CUE))
    assert written(steps) == alone(small)
    assert {step.by for step in steps} == {"small"}


def test_at_a_cue_the_target_begins_the_step_and_what_the_small_model_began_is_given_up(small, tiny_target) -> None:
    params = Params(**NO_CUE | {"affirms": EVERYTHING}, takeover_tokens=5)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    taken = [step for step in steps if step.by == "target"]
    assert taken and all(0 < step.given_up <= 5 and len(step.token_ids) <= 5 for step in taken)
    words = vocabulary(tiny_target)
    for before, step in pairwise(steps):
        if step.by == "target":
            assert before.token_ids[-1] in words.step_ends


def test_where_the_targets_beginning_leans_alike_it_can_be_given_up_instead(small: Path, tiny_target: Path) -> None:
    params = Params(**NO_CUE | {"affirms": EVERYTHING}, keeps_target=False)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    assert len(steps) > 3
    assert {(step.by, step.given_up) for step in steps} == {("small", 0)}


def test_a_check_that_is_begun_the_target_goes_on_with(small: Path, tiny_target: Path) -> None:
    params = Params(**NO_CUE | {"verifies": EVERYTHING}, takeover_tokens=4, check_tokens=11)
    steps = think(small, tiny_target, params, sampling=DRAWN)
    begun = next(number for number, step in enumerate(steps) if step.given_up)
    assert [step.by for step in steps[begun : begun + 2]] == ["target", "target"]
    assert len(steps[begun + 1].token_ids) == 11


def test_when_too_many_steps_have_turned_back_the_target_recaps_behind_a_sentence_of_ours(small, tiny_target) -> None:
    params = Params(
        **NO_CUE | {"reflects": EVERYTHING}, takeover_tokens=3, recap_after=1, recap_text="Check:", recap_tokens=8
    )
    steps, asked = think(small, tiny_target, params, sampling=DRAWN), vocabulary(tiny_target).ids("Check:")
    put_in = [number for number, step in enumerate(steps) if step.token_ids == asked]
    assert put_in
    recap = steps[put_in[0] + 1]
    assert (recap.by, len(recap.token_ids)) == ("target", 8)
