"""Generalised Jensen-Shannon divergence by hand, and its two ends."""

import math

import pytest
import torch

from models.losses import Drafted, jsd


def value(p: list[float], q: list[float], beta: float) -> float:
    drafted = Drafted(0, torch.tensor([q]).double().log(), target_probs=torch.tensor([p]))
    return float(jsd.loss(drafted, jsd.Params(beta=beta)))


def kl(left: list[float], right: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True))


def test_two_tokens_by_hand_and_as_much_with_the_two_exchanged() -> None:
    p, q, m = [0.5, 0.5], [0.1, 0.9], [0.3, 0.7]
    wanted = 0.5 * kl(p, m) + 0.5 * kl(q, m)
    assert value(p, q, 0.5) == pytest.approx(wanted, abs=1e-6)
    assert value(q, p, 0.5) == pytest.approx(wanted, abs=1e-6)


def test_its_ends_are_forward_and_reverse_kl_up_to_a_factor() -> None:
    p, q = [0.5, 0.5], [0.1, 0.9]
    assert value(p, q, 1e-3) / 1e-3 == pytest.approx(kl(p, q), rel=0.01)
    assert value(p, q, 1 - 1e-3) / 1e-3 == pytest.approx(kl(q, p), rel=0.01)


def test_what_never_meets_costs_the_most_there_is() -> None:
    assert value([1.0, 0.0], [1e-30, 1.0], 0.5) == pytest.approx(math.log(2), abs=1e-6)
