"""Imported answers against the target's own: a statistic whose truth is known, and a model that is really asked."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.checkpoints.loading import load_model
from models.core.evaluation.own_answers import (
    BATCH,
    MOST_TOKENS,
    NUM_PROMPTS,
    UNLIKE,
    answer,
    compare,
    difference,
    read_of,
    unlike,
)
from models.core.learning.hidden import Sample
from models.targets import stop_ids

MAX_LEN = 256


def test_a_case_worked_by_hand() -> None:
    found = difference([-2.0, -3.0, -4.0], [-1.0, -1.0, -1.0])  # −1, −2, −3: mean −2, standard error 1 / √3
    assert found.value == -2.0
    assert found.high == pytest.approx(-2 + 2.919986 / math.sqrt(3), abs=1e-5)  # Student's t of 2 degrees, 95%
    assert unlike(found)
    assert not unlike(difference([-9.0], [-1.0]))  # one prompt shows nothing
    assert not unlike(difference([-1.0, -1.3], [-1.0, -1.0]))


def test_what_does_not_come_in_pairs_is_refused() -> None:
    for imported, own in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="wanted answers in pairs"):
            difference(imported, own)


@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy"])
def test_a_warning_is_as_rare_as_it_says_and_references_are_found(noise: str) -> None:
    rng, runs = np.random.default_rng(0), 500
    draw = {
        "normal": lambda: rng.normal(size=NUM_PROMPTS),
        "skewed": lambda: rng.exponential(size=NUM_PROMPTS) - 1,
        "heavy": lambda: rng.standard_t(4, size=NUM_PROMPTS) / math.sqrt(2),
    }[noise]

    def warned(truth: float, spread: float = 0.4) -> float:
        found = (difference((truth + spread * draw()).tolist(), [0.0] * NUM_PROMPTS) for _ in range(runs))
        return sum(map(unlike, found)) / runs

    rates = {truth: warned(truth) for truth in (0.0, -0.1, UNLIKE, -0.4, -1.0)}
    print(f"\n{noise}: warned at a true difference of", {truth: f"{rate:.2%}" for truth, rate in rates.items()})
    assert rates[0.0] == 0.0
    assert rates[UNLIKE] <= (0.13 if noise == "skewed" else 0.07)  # a tail upwards makes it twice as often
    assert rates[-0.4] > 0.9
    assert rates[-1.0] == 1.0


def test_answers_are_compared_as_far_as_the_imported_one_went_if_it_was_cut() -> None:
    ended, cut = Sample("a", "chat", [1], [5, 6, 2]), Sample("a", "chat", [1], [5, 6, 7])
    assert [read_of(one, {2}) for one in (ended, cut)] == [MOST_TOKENS, 3]
    assert read_of(cut._replace(completion_ids=[5] * 99), {2}) == MOST_TOKENS


def prompts(number: int) -> list[Sample]:
    asked = torch.randint(3, 259, (number, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return [Sample(f"import-{place}", "chat", one, [3]) for place, one in enumerate(asked)]


def test_the_targets_own_answers_never_warn_and_those_of_others_do(tiny_target: Path) -> None:
    model, stops, values = load_model(tiny_target), stop_ids(tiny_target), []
    for seed in range(20):
        rng, temperature = torch.Generator().manual_seed(seed), (0.0, 0.7, 1.0, 1.0)[seed % 4]
        asked = [one._replace(temperature=temperature) for one in prompts(BATCH)]
        own = answer(model, asked, [20] * BATCH, stops, MAX_LEN, rng)
        found = compare(model, own, stops, MAX_LEN, rng)
        assert not unlike(found), (seed, found)
        values.append(found.value)
    print(f"\nown answers: {np.mean(values):+.3f} nats a token, from {min(values):+.3f} to {max(values):+.3f}")
    assert abs(np.mean(values)) < 0.1  # what is compared does not lean to either side
    rng = torch.Generator().manual_seed(0)
    for text in (b"The capital of France is Paris.", b"def f(x):\n    return x + 1"):
        written = [one._replace(completion_ids=[3 + byte for byte in text], temperature=1.0) for one in prompts(BATCH)]
        found = compare(model, written, stops, MAX_LEN, rng)
        print(f"references: {found.value:+.2f} nats a token, at most {found.high:+.2f}")
        assert unlike(found)
