"""Servers' counts become windows that the drift detector tests, of one draft each and of traffic alone."""

import math

import numpy as np
import pytest

from infra.rollouts import DraftCounts
from models.core.evaluation.drift_detector import DriftDetector, Params
from services.server_metrics import MIN_STEPS, MetricWindows, promised_of_all, read_counts

A, B = "http://a", "http://b"


def counts(steps: float, accepted: float = 0.0) -> DraftCounts:
    return DraftCounts(steps=int(steps), drafted=3 * int(steps), accepted=int(accepted), per_position=())


def test_what_a_plugin_tells_is_read_by_position_and_told_in_a_line() -> None:
    since = {"drafts": 10.0, "drafted": 30.0, "accepted": 12.0, "mean_accepted_length": 2.2}
    found = read_counts(A, since | {"accepted_0": 8.0, "accepted_1": 4.0, "accepted_2": 0.0})
    assert found.told() == "τ 2.20 over 10 steps of all domains, accepted by position 0.80, 0.40, 0.00"
    assert counts(0).told() == "nothing was drafted since it serves"
    with pytest.raises(ValueError, match="http://a keeps no metrics.*--read-metrics"):
        read_counts(A, {"mean_accepted_length": None})


def test_a_window_is_of_one_server_and_one_draft_and_has_steps_enough() -> None:
    windows = MetricWindows()
    windows.take(A, 1, counts(100, 90))
    windows.take(B, 1, counts(0))
    windows.take(A, 1, counts(99 + MIN_STEPS, 400))
    assert windows.of(1, -1) == []
    windows.take(A, 1, counts(100 + MIN_STEPS, 602))
    windows.take(B, 1, counts(MIN_STEPS, 7))
    windows.take(A, 2, counts(5 * MIN_STEPS, 900))  # another draft serves there
    windows.take(A, 2, counts(6 * MIN_STEPS, 901))
    found = windows.of(1, -1)
    assert [(one.domain, one.steps, one.drafted, one.accepted) for one in found] == [
        ("other", MIN_STEPS, 3 * MIN_STEPS, 512),
        ("other", MIN_STEPS, 3 * MIN_STEPS, 7),
    ]
    assert windows.of(1, found[0].number) == found[1:]
    assert [one.accepted for one in windows.of(2, -1)] == [1]


def test_counts_of_a_server_that_started_again_or_was_asked_by_the_reconciler_are_left_out() -> None:
    windows = MetricWindows()
    windows.take(A, 1, counts(1000))
    windows.take(A, 1, counts(10))
    windows.take(A, 1, counts(9 + MIN_STEPS))
    assert windows.of(1, -1) == []
    windows.begin_anew(A)
    windows.take(A, 1, counts(10 + 2 * MIN_STEPS))
    assert windows.of(1, -1) == []
    windows.take(A, 1, counts(10 + 3 * MIN_STEPS))
    assert [one.steps for one in windows.of(1, -1)] == [MIN_STEPS]


def test_all_traffic_is_held_against_the_least_of_the_domains_that_a_draft_knows() -> None:
    assert promised_of_all({"code": 2.5, "chat": 1.8, "new": 1.1}) == {"other": 1.8}
    assert promised_of_all({"code": 2.5}) == {"other": 2.5}
    assert promised_of_all({}) == {}


@pytest.mark.parametrize(("lost", "told"), [(0.0, False), (0.05, False), (0.45, True)])
def test_a_fall_of_all_traffic_is_told_and_a_change_of_what_it_is_made_of_is_not(lost: float, told: bool) -> None:
    """Two domains whose share swings from window to window; each conversation has a gain of its own."""
    promised, params = {"code": 2.5, "chat": 1.8}, Params()
    rng, num_told, num_servers = np.random.default_rng(0), 0, 20
    for _ in range(num_servers):
        windows, detector = MetricWindows(), DriftDetector(promised_of_all(promised), params)
        steps = accepted = 0
        is_told = False
        for number in range(200):
            windows.take(A, 1, counts(steps, accepted))
            share = 0.5 + 0.5 * math.sin(number / 20)
            for domain in rng.choice(["code", "chat"], 12, p=[share, 1 - share]):
                gain = max(0.0, rng.normal((promised[domain] - 1) * (1 - lost), 0.25))
                steps, accepted = steps + 50, accepted + round(50 * gain)
            detector.take(windows.of(1, number - 2))
            is_told |= any(standing.fallen for standing in detector.standings().values())
        assert len(windows.of(1, -1)) == 199
        num_told += is_told
    print(f"lost {lost:.0%}: a fall is told of {num_told} of {num_servers} servers in 200 windows")
    assert num_told == num_servers * told
