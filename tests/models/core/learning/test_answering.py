from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

from models.core.checkpoints.loading import load_model
from models.core.learning.answering import Ask, go_on
from tests.models.drafts.answered import prompts

NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> PreTrainedModel:
    return load_model(tiny_target)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def alone(model: PreTrainedModel, prompt: list[int], number: int) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), max_new_tokens=number, **settings)[0, len(prompt) :].tolist()


def test_a_batch_of_any_lengths_is_answered_as_each_prompt_alone(model: PreTrainedModel) -> None:
    asked = prompts(6)
    assert len({len(prompt) for prompt in asked}) > 3
    numbers = [12, 1, 7, 12, 3, 9]
    said = go_on(model, [Ask(prompt, number) for prompt, number in zip(asked, numbers, strict=True)], NONE, rng())
    assert said == [alone(model, prompt, number) for prompt, number in zip(asked, numbers, strict=True)]


def test_an_answer_ends_behind_a_stop_and_the_others_go_on(model: PreTrainedModel) -> None:
    asked = prompts(3)
    whole = [alone(model, prompt, 10) for prompt in asked]
    stop = whole[0][4]
    ends = [one[: one.index(stop) + 1] if stop in one else one for one in whole]
    assert len(ends[0]) < 10
    assert go_on(model, [Ask(prompt, 10) for prompt in asked], frozenset({stop}), rng()) == ends


def test_what_was_said_in_time_is_the_beginning(model: PreTrainedModel) -> None:
    left = iter([False, False, False])
    said = go_on(model, [Ask(prompt, 10) for prompt in prompts(2)], NONE, rng(), lambda: next(left, True))
    assert said == [alone(model, prompt, 3) for prompt in prompts(2)]


@pytest.mark.slow
def test_drawn_tokens_follow_the_models_law_at_the_temperature_of_their_row(model: PreTrainedModel) -> None:
    [prompt], number = prompts(1), 2000
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    for temperature in (0.3, 1.0):
        said = go_on(model, [Ask(prompt, 1, temperature)] * number + [Ask(prompt, 1)], NONE, rng())
        assert said[-1] == [int(logits.argmax())]
        law = (logits / temperature).softmax(-1)
        counts = torch.bincount(torch.tensor(said[:-1])[:, 0], minlength=len(law)).double()
        common = law * number >= 5
        seen = torch.cat([counts[common], counts[~common].sum()[None]])
        wanted = torch.cat([law[common], law[~common].sum()[None]]) * number
        assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-4


def test_a_seed_draws_the_same_answer_and_another_one_another(model: PreTrainedModel) -> None:
    asks = [Ask(prompt, 12, 1.0) for prompt in prompts(3)]
    assert go_on(model, asks, NONE, rng()) == go_on(model, asks, NONE, rng())
    assert go_on(model, asks, NONE, rng(1)) != go_on(model, asks, NONE, rng())


@pytest.mark.parametrize("ask", [Ask([], 3), Ask([4], 0)])
def test_nothing_to_go_on_from_and_nothing_wanted_are_refused(model: PreTrainedModel, ask: Ask) -> None:
    with pytest.raises(ValueError, match="wanted tokens to go on from and at least one more"):
        go_on(model, [ask], NONE, rng())
