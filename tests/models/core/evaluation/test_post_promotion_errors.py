"""The post-promotion test on simulated requests: how often it errs, and how soon it finds a loss."""

import numpy as np
import pytest

from models.core.evaluation.post_promotion_test import Params
from models.recipe import load_recipe
from tests.benchmarks.rollback_delay import SHARES, WITHIN, Rules, Truth, requests_until_rolled_back

RECIPE = load_recipe("smollm2-cpu")
RULES = Rules(RECIPE.num_draft_tokens, RECIPE.gate.floor, Params().alpha, Params().per_look)


def taken_back(tau: float, kept: dict[str, float], num_looks: int, num_runs: int, rules: Rules = RULES) -> list[float]:
    return requests_until_rolled_back(Truth(tau, kept), rules, num_looks, num_runs, np.random.default_rng(0)).tolist()


def every(kept: float) -> dict[str, float]:
    return dict.fromkeys(SHARES, kept)


@pytest.mark.slow
def test_a_draft_that_is_no_worse_is_hardly_ever_taken_back() -> None:
    found = taken_back(1.6, every(1.0), num_looks=600, num_runs=500)
    print(f"taken back without a loss: {np.isfinite(found).mean():.1%}")
    assert np.isfinite(found).mean() <= 2 * RULES.alpha  # 500 runs can't show 1% more closely


@pytest.mark.parametrize("tau", [1.6, 2.0, 3.0])
def test_a_loss_of_a_tenth_is_found_within_200_requests(tau: float) -> None:
    found = np.array(taken_back(tau, every(0.9), num_looks=13, num_runs=500))
    print(f"τ {tau}: half of the runs after {np.median(found):.0f} requests, {(found <= WITHIN).mean():.1%} after 200")
    assert (found <= WITHIN).mean() > 0.95


def test_with_seven_drafted_tokens_it_takes_no_longer() -> None:
    found = np.array(taken_back(2.0, every(0.9), 13, 500, RULES._replace(num_draft_tokens=7)))
    assert (found <= WITHIN).mean() > 0.95


def test_a_domain_that_loses_is_found_where_the_others_gain() -> None:
    found = taken_back(1.6, {"chat": 1.1, "code": 1.0, "math": 0.7}, num_looks=60, num_runs=200)
    assert np.isfinite(found).mean() > 0.95
