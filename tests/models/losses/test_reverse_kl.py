"""Reverse KL by hand."""

import math

import pytest
import torch

from models.losses import Drafted, reverse_kl


def value(p: list[float], q: list[float], **settings: float) -> float:
    drafted = Drafted(0, torch.tensor([q]).log(), target_probs=torch.tensor([p]))
    return float(reverse_kl.loss(drafted, reverse_kl.Params(**settings)))


def test_two_tokens_by_hand() -> None:
    wanted = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert value([0.5, 0.5], [0.25, 0.75]) == pytest.approx(wanted, abs=1e-6)


def test_a_token_that_the_target_never_says_costs_by_the_least_probability() -> None:
    assert value([1.0, 0.0], [0.5, 0.5], least_prob=1e-3) == pytest.approx(
        -math.log(2) - 0.5 * math.log(1e-3), abs=1e-5
    )


def test_a_place_whose_target_can_not_be_drafted_weighs_nothing() -> None:
    assert value([0.0, 0.0], [0.5, 0.5]) == 0
