import math

import numpy as np
import pytest

from models.core.evaluation.post_promotion_test import Floats, findings
from models.recipe import PostPromotionParams, load_recipe
from models.types import ALL
from tests.benchmarks.rollback_delay import SHARES, WITHIN, Rules, Truth, requests_until_rolled_back

K = 3
ALPHA = PostPromotionParams().alpha


def costs(tau: float, share: float, num_requests: int, rng: np.random.Generator) -> Floats:
    """Draw steps per token of a draft that has `share` of the other one's τ in all, and of that one: [N, 2].

    Requests differ by 0.5 in τ and the two drafts on one request by 0.3, as conversations of the demo do.
    """
    easy = rng.normal(0.0, 0.5, num_requests)
    own = rng.normal(0.0, 0.3 / math.sqrt(2), (num_requests, 2))
    drawn = 1 / np.clip(tau + easy[:, None] + own, 1, K + 1)
    return np.asarray(np.clip(drawn * (1 / tau) / drawn.mean() * np.array([1 / share, 1.0]), 1 / (K + 1), 1))


def test_what_a_request_costs_is_the_inverse_of_tau() -> None:
    drawn = np.array([[1 / 1.5, 1 / 2.0], [1 / 1.5, 1 / 2.0]])
    found = findings(["chat", "code"], drawn, K, floor=0.1, alpha=0.01)
    assert found.keys() == {ALL, "chat", "code"}
    assert (found[ALL].tau, found[ALL].previous_tau) == pytest.approx((1.5, 2.0))
    assert found[ALL].excess == pytest.approx(1 / 1.5 - 1 / 2.0)
    assert found["code"].excess == pytest.approx(0.9 / 1.5 - 1 / 2.0)
    assert (found[ALL].num_requests, found["chat"].num_requests, found[ALL].lost) == (2, 1, False)


def test_a_domain_that_loses_is_found_where_the_others_gain() -> None:
    rng = np.random.default_rng(3)
    drawn = np.concatenate([costs(1.6, 1.2, 600, rng), costs(2.0, 0.7, 200, rng)])
    found = findings(["chat"] * 600 + ["code"] * 200, drawn, K, floor=0.05, alpha=ALPHA)
    assert {domain: finding.lost for domain, finding in found.items()} == {ALL: False, "chat": False, "code": True}


def test_a_loss_within_the_floor_is_no_loss_of_a_domain() -> None:
    drawn = costs(1.6, 0.96, 4000, np.random.default_rng(4))
    found = findings(["chat"] * 4000, drawn, K, floor=0.05, alpha=ALPHA)
    assert (found[ALL].lost, found["chat"].lost) == (True, False)


def test_the_errors_of_all_findings_add_up_to_alpha_at_most() -> None:
    drawn = costs(1.6, 1.0, 40, np.random.default_rng(5))
    found = findings([f"domain-{place}" for place in range(40)], drawn, K, floor=0.05, alpha=ALPHA)
    assert 0.98 * ALPHA < sum(finding.alpha for finding in found.values()) <= ALPHA


@pytest.mark.parametrize(
    ("domains", "drawn", "reason"),
    [
        ([], np.zeros((0, 2)), "a pair of costs for each request"),
        (["chat"], np.zeros((2, 2)), "a pair of costs for each request"),
        (["chat"], np.array([[0.1, 0.5]]), "from 0.25 to 1, got 0.1"),
        (["chat"], np.array([[1.5, 0.5]]), "from 0.25 to 1, got 0.5 to 1.5"),
        (["chat"], np.array([[math.nan, 0.5]]), "from 0.25 to 1"),
    ],
)
def test_what_is_no_pair_of_costs_is_refused(domains: list[str], drawn: Floats, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        findings(domains, drawn, K, floor=0.05, alpha=ALPHA)


# On simulated requests: how often it errs, and how soon it finds a loss.
RECIPE = load_recipe("smollm2-cpu")
RULES = Rules(RECIPE.num_draft_tokens, RECIPE.gate.floor, PostPromotionParams().alpha, PostPromotionParams().per_look)


def taken_back(tau: float, kept: float, num_looks: int, rules: Rules = RULES) -> Floats:
    truth = Truth(tau, dict.fromkeys(SHARES, kept))
    return np.array(requests_until_rolled_back(truth, rules, num_looks, 500, np.random.default_rng(0)))


@pytest.mark.slow
def test_a_draft_that_is_no_worse_is_hardly_ever_taken_back() -> None:
    found = taken_back(1.6, 1.0, num_looks=600)
    print(f"taken back without a loss: {np.isfinite(found).mean():.1%}")
    assert np.isfinite(found).mean() <= 2 * RULES.alpha  # 500 runs can't show 1% more closely


@pytest.mark.parametrize(("tau", "num_draft_tokens"), [(1.6, 3), (2.0, 3), (2.0, 7), (3.0, 3)])
def test_a_loss_of_a_tenth_is_found_within_200_requests(tau: float, num_draft_tokens: int) -> None:
    found = taken_back(tau, 0.9, 13, RULES._replace(num_draft_tokens=num_draft_tokens))
    print(f"τ {tau}: half of the runs after {np.median(found):.0f} requests, {(found <= WITHIN).mean():.1%} after 200")
    assert (found <= WITHIN).mean() > 0.95
