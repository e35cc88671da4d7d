"""What holds of every way to let a small model write where it will do."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from models import catalog
from models.engines import Sampling
from models.reasoning import Vocabulary
from tests.models.reasoning.thinking import MAX_TOKENS, PROMPT, STEP_ENDS, alone, think, vocabulary, written

NAMES = catalog.names("reasoning")
# What is put in is neither's; without it only what both write is left.
PUTS_IN_NOTHING = {"speculative_thinking": {"recap_text": ""}}
# So that the small model writes, nine tokens at once at most.
NINE = {"spec_reason": {"threshold": 0}, "speculative_thinking": {"takeover_tokens": 9}}


def params_of(name: str, **changes: object) -> object:
    return catalog.parse("reasoning", {"name": name, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_where_the_small_model_is_the_target_itself_the_answer_is_the_targets(name: str, tiny_target: Path) -> None:
    steps = think(tiny_target, tiny_target, params_of(name, **PUTS_IN_NOTHING.get(name, {})))
    assert written(steps) == alone(tiny_target)
    assert len(steps) > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_step_ends_where_one_ends_or_is_full_and_the_answer_at_its_limit(name, small, tiny_target) -> None:
    params = params_of(name, max_step_tokens=9, **NINE[name])
    steps, ends = think(small, tiny_target, params), vocabulary(tiny_target).answer_ends
    assert all(step.token_ids for step in steps)
    last = written(steps)[-1]
    assert len(written(steps)) == MAX_TOKENS or last in ends
    assert not any(token in ends for step in steps for token in step.token_ids[:-1])
    of_small = [step.token_ids for step in steps[:-1] if step.by == "small"]
    assert of_small
    assert all(len(one) == 9 or one[-1] in STEP_ENDS for one in of_small)
    assert think(small, tiny_target, params) == steps


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_draws_the_same_answer_and_another_seed_another(name, small, tiny_target) -> None:
    drawn = [
        written(think(small, tiny_target, params_of(name), sampling=Sampling(temperature=1.0, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", NAMES)
def test_what_can_not_be_answered_is_refused(name: str, small: Path, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        think(small, tiny_target, params_of(name), prompt=[])
    with pytest.raises(ValueError, match=r"max_tokens is 60; wanted 1 to 10,"):
        think(small, tiny_target, params_of(name), max_model_len=len(PROMPT) + 10)


def test_a_step_ends_at_a_blank_line_or_where_no_token_holds_one_at_a_line(tiny_target: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny_target)
    [line] = words.encode("\n", add_special_tokens=False)
    assert Vocabulary(words, frozenset()).step_ends == (line,)
    words.add_tokens(["\n\n", ".\n\n"])
    assert Vocabulary(words, frozenset()).step_ends == (len(words) - 2, len(words) - 1)
    assert vocabulary(tiny_target).ids("a\n") == vocabulary(tiny_target).ids("a") + vocabulary(tiny_target).ids("\n")
