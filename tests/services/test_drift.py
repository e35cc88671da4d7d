from typing import Any

from models.core.evaluation.drift_detector import DOUBTED, FIRST, SHARE
from services.drift import LOST, AcceptanceSampler


def test_the_first_requests_of_each_draft_and_domain_are_drafted_alone() -> None:
    alone = AcceptanceSampler()
    for draft in ("1", "2"):
        for domain in ("chat", "code"):
            assert all(alone.draws(draft, domain) for _ in range(FIRST))


def share_of(alone: AcceptanceSampler, number: int = 20_000, **told: Any) -> float:
    return sum(alone.draws("1", "chat", **told) for _ in range(number)) / number


def test_later_only_a_share_is() -> None:
    alone = AcceptanceSampler()
    assert share_of(alone, 256) * 256 < 48
    share_of(alone)
    # Binomial: five standard deviations are 0.006.
    assert abs(share_of(alone) - SHARE) < 0.006
    assert abs(share_of(alone, doubted=True) - DOUBTED) < 0.012


def test_fewer_are_drawn_the_more_of_the_tokens_that_costs() -> None:
    alone = AcceptanceSampler()
    assert all(alone.draws("1", "chat", lost=10.0) for _ in range(FIRST))
    # Binomial around 1 in 1,000: five standard deviations are 0.0011.
    assert abs(share_of(alone, lost=10.0) - LOST / 10) < 0.0011
    assert abs(share_of(alone, doubted=True, lost=10.0) - 4 * LOST / 10) < 0.0025
    assert abs(share_of(alone, lost=0.1) - SHARE) < 0.006


def test_names_that_clients_make_up_do_not_fill_the_memory() -> None:
    alone = AcceptanceSampler()
    for number in range(5000):
        alone.draws("1", f"domain-{number}")
    assert len(alone._seen) <= 1024
