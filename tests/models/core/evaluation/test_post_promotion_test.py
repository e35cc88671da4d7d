"""Whether a draft lost, on made-up requests of which the truth is known."""

import math

import numpy as np
import pytest

from models.core.evaluation.post_promotion_test import Floats, Params, findings
from models.types import ALL

K = 3
ALPHA = Params().alpha


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
