import math
from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.checkpoints.loading import load_model
from models.core.learning.answering import BATCH, NUM_PROMPTS, UNLIKE, answer, compare, difference, unlike
from models.core.learning.hidden import Sample
from models.targets import stop_ids

MAX_LEN = 256


def test_a_case_worked_by_hand() -> None:
    found = difference([-2.0, -4.0, -6.0], [2, 2, 2])  # −1, −2, −3 a token: mean −2, standard error 1 / √3
    assert found.value == -2.0
    assert found.high == pytest.approx(-2 + 2.919986 / math.sqrt(3), abs=1e-5)  # Student's t of 2 degrees, 95%
    assert unlike(found)
    assert not unlike(difference([-9.0], [1]))  # one answer shows nothing
    assert not unlike(difference([0.0, -0.3], [1, 1]))
    assert difference([-3.0, 0.0], [1, 5]).value == -0.5  # each token counts the same, or early ends would lean
    for excess, lengths in (([], []), ([1.0], [1, 2])):
        with pytest.raises(ValueError, match="wanted answers with their lengths"):
            difference(excess, lengths)


@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy"])
def test_a_warning_is_as_rare_as_it_says_and_references_are_found(noise: str) -> None:
    rng, runs = np.random.default_rng(0), 500
    draw = {
        "normal": lambda: rng.normal(size=NUM_PROMPTS),
        "skewed": lambda: rng.exponential(size=NUM_PROMPTS) - 1,
        "heavy": lambda: rng.standard_t(4, size=NUM_PROMPTS) / math.sqrt(2),
    }[noise]

    def warned(truth: float, spread: float = 0.4) -> float:
        found = (difference((truth + spread * draw()).tolist(), [1] * NUM_PROMPTS) for _ in range(runs))
        return sum(map(unlike, found)) / runs

    rates = {truth: warned(truth) for truth in (0.0, -0.1, UNLIKE, -0.4, -1.0)}
    print(f"\n{noise}: warned at a true difference of", {truth: f"{rate:.2%}" for truth, rate in rates.items()})
    assert rates[0.0] == 0.0
    assert rates[UNLIKE] <= (0.13 if noise == "skewed" else 0.07)  # a tail upwards makes it twice as often
    assert rates[-0.4] > 0.9
    assert rates[-1.0] == 1.0


def prompts(number: int) -> list[Sample]:
    asked = torch.randint(3, 259, (number, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return [Sample(f"import-{place}", "chat", one, [3]) for place, one in enumerate(asked)]


def test_the_targets_own_answers_never_warn_and_those_of_others_do(tiny_target: Path) -> None:
    model, stops, values = load_model(tiny_target), stop_ids(tiny_target), []
    for seed in range(8):
        rng, temperature = torch.Generator().manual_seed(seed), (0.0, 0.7, 1.0, 1.0)[seed % 4]
        asked = [one._replace(temperature=temperature) for one in prompts(BATCH)]
        own = answer(model, asked, [20] * BATCH, stops, MAX_LEN, rng)
        found = compare(model, own)
        assert not unlike(found), (seed, found)
        values.append(found.value)
    print(f"\nown answers: {np.mean(values):+.3f} nats a token, from {min(values):+.3f} to {max(values):+.3f}")
    assert abs(np.mean(values)) < 0.1  # what is compared does not lean to either side
    for text in (b"The capital of France is Paris.", b"def f(x):\n    return x + 1"):
        written = [one._replace(completion_ids=[3 + byte for byte in text], temperature=1.0) for one in prompts(BATCH)]
        found = compare(model, written)
        print(f"references: {found.value:+.2f} nats a token, at most {found.high:+.2f}")
        assert unlike(found)


def test_words_that_the_target_would_not_choose_are_found_though_likelier(tiny_target: Path) -> None:
    """To the target any token is as likely as another, but for A, which follows A; a writer says B after five of it."""
    model, stops = load_model(tiny_target), stop_ids(tiny_target)
    size, a, b = model.config.vocab_size, 100, 101
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # so that the last token alone is read
                weight.zero_()
        embedding = torch.zeros(size, model.config.hidden_size)
        embedding[:, 1], embedding[a] = 1.0, torch.eye(model.config.hidden_size)[0]
        model.get_input_embeddings().weight.copy_(embedding)
        head = torch.zeros_like(embedding)
        head[a, 0] = math.log(9 * size) / model.config.hidden_size**0.5  # after A its chance is 0.9
        model.lm_head.weight = torch.nn.Parameter(head)
    asked = [one._replace(temperature=1.0) for one in prompts(BATCH)]
    own = answer(model, asked, [30] * BATCH, stops, MAX_LEN, torch.Generator().manual_seed(0))
    written = [one._replace(completion_ids=[a, a, a, a, a, b] * 5) for one in asked]
    log_probs = []
    for read in ([one.token_ids for one in samples if len(one.completion_ids) == 30] for samples in (written, own)):
        with torch.inference_mode():
            told = model(torch.tensor(read)).logits[:, -31:-1].float().log_softmax(-1)
        log_probs.append(float(told.gather(-1, torch.tensor(read)[:, -30:, None]).mean()))
    assert log_probs[0] > log_probs[1] + 1
    assert not unlike(compare(model, own))
    assert unlike(compare(model, written))
