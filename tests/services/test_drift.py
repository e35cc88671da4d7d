import pytest

from models.core.evaluation.drift_detector import DOUBTED, FIRST, SHARE
from services.drift import LOST, AcceptanceSampler


def test_the_first_requests_of_each_draft_and_domain_are_drafted_alone() -> None:
    alone = AcceptanceSampler()
    for draft in ("1", "2"):
        for domain in ("chat", "code"):
            assert all(alone.draws(draft, domain) for _ in range(FIRST))


def test_later_only_a_share_is() -> None:
    alone = AcceptanceSampler()
    drawn = [alone.draws("1", "chat") for _ in range(40_000)]
    share = sum(drawn[20_000:]) / 20_000
    # Binomial: five standard deviations are 0.006.
    assert abs(share - SHARE) < 0.006
    assert sum(drawn[:256]) < 48
    assert abs(sum(alone.draws("1", "chat", doubted=True) for _ in range(20_000)) / 20_000 - DOUBTED) < 0.012


@pytest.mark.slow
def test_fewer_are_drawn_the_more_of_the_tokens_that_costs() -> None:
    alone = AcceptanceSampler()
    drawn = [alone.draws("1", "chat", lost=10.0) for _ in range(40_000)]
    assert all(drawn[:FIRST])
    # Binomial around 1 in 1,000: five standard deviations are 0.0008.
    assert abs(sum(drawn[FIRST:]) / len(drawn[FIRST:]) - LOST / 10) < 0.0008
    doubted = sum(alone.draws("1", "chat", doubted=True, lost=10.0) for _ in range(40_000)) / 40_000
    assert abs(doubted - 4 * LOST / 10) < 0.002
    assert abs(sum(alone.draws("1", "chat", lost=0.1) for _ in range(40_000)) / 40_000 - SHARE) < 0.006


def test_names_that_clients_make_up_do_not_fill_the_memory() -> None:
    alone = AcceptanceSampler()
    for number in range(5000):
        alone.draws("1", f"domain-{number}")
    assert len(alone._seen) <= 1024
