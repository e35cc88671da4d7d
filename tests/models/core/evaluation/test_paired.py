from typing import Any

import numpy as np
import pytest

from models.core.evaluation.paired import Score, clusters, gain
from tests.models.core.evaluation.conversations import changed


def score(name: str, accepted: float, domain: str = "chat", cluster: str = "", weight: float = 1.0) -> Score:
    return Score(id=name, domain=domain, cluster=cluster, weight=weight, steps=10, accepted=accepted)


def window(*sizes: int, domain: str = "chat") -> list[Score]:
    """Conversations in clusters of these sizes."""
    return [
        score(f"{domain}{number}-{member}", 10.0, domain, f"{domain}{number}")
        for number, size in enumerate(sizes)
        for member in range(size)
    ]


def test_a_cluster_says_one_thing() -> None:
    champion = [score("a", 10, cluster="x"), score("b", 10, cluster="x"), score("c", 10)]
    challenger = [score("a", 12, cluster="x"), score("b", 16, cluster="x"), score("c", 9)]
    found = clusters(champion, challenger[::-1])
    assert sorted(found.differences.tolist()) == pytest.approx([-0.1, 0.4])


def test_a_cluster_counts_once_however_large_it_is_and_a_conversation_without_one_is_its_own() -> None:
    champion = [score("x", 10), score("a", 10, cluster="x")]
    assert len(clusters(champion, champion).weights) == 2
    scores = window(*[1] * 40)
    assert clusters(scores, scores).weights.tolist() == [1.0] * 40
    scores = window(100, *[1] * 50)
    assert clusters(scores, scores).weights.min() > 0.95


def test_a_domain_counts_by_its_share_of_traffic_not_by_its_clusters() -> None:
    scores = window(*[10] * 10, domain="code") + window(*[1] * 100)
    weights = clusters(scores, scores).weights
    code = weights[weights == weights.max()].sum() / weights.sum()
    assert 0.35 < code <= 0.5  # of clusters it has 9%, of conversations half
    assert weights.max() == 1


def test_a_cluster_tells_the_gain_of_as_many_requests_as_it_stands_for_and_counts_once_in_the_test() -> None:
    group = [score(f"g{member}", 10, cluster="g", weight=2.5) for member in range(4)]
    alone = [score(f"a{number}", 10) for number in range(30)]
    for shares in (None, {"chat": 1.0}):
        found = clusters(group + alone, changed(group, [0.0, 0.4, 0.8, 1.2]) + alone, shares)
        assert found.weights.tolist() == pytest.approx([1.0] * 31)
        assert sorted(found.shares.tolist()) == pytest.approx([1 / 40] * 30 + [10 / 40])
        assert found.differences.max() == pytest.approx(0.6)
        assert gain(found).value == pytest.approx(0.6 * 10 / 40)


def test_a_cluster_of_two_domains_counts_in_both_by_their_shares() -> None:
    scores = [score("a", 10, "code", "both"), score("b", 10, "chat", "both"), score("c", 10, "chat")]
    found = clusters(scores, scores, {"code": 0.4, "chat": 0.6})
    assert sorted(found.shares.tolist()) == pytest.approx([0.3, 0.7])


def test_unequal_clusters_widen_the_interval_as_much_as_they_amount_to_fewer() -> None:
    """Of many windows whose few clusters are of unequal sizes, the interval holds the mean that each was drawn with."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(1000):
        sizes = np.floor(10 ** rng.random(12))
        before = [score(f"{number}", 10, weight=size) for number, size in enumerate(sizes.tolist())]
        found = gain(clusters(before, changed(before, rng.normal(0.2, 0.1, 12))))
        held += found.low <= 0.2 <= found.high
    print("held", held)
    assert 935 <= held <= 970


def test_shares_of_traffic_outweigh_what_was_held_out() -> None:
    scores = window(*[1] * 30, domain="code") + window(*[1] * 30)
    weights = clusters(scores, scores, {"chat": 0.2, "code": 0.8}).weights
    chat, code = np.unique(weights)
    assert code == 1
    assert chat == pytest.approx(1 / 3, abs=0.01)  # a fifth of the traffic is cut off the heavier
    with pytest.raises(ValueError, match="share of traffic above 0 of each domain, none of: chat"):
        clusters(scores, scores, {"code": 1.0})


def test_the_gain_of_one_window_is_the_mean_with_an_interval_over_clusters() -> None:
    champion, changes = window(*[1] * 30), np.random.default_rng(0).normal(0.1, 0.2, 30)
    found = gain(clusters(champion, changed(champion, changes)))
    assert found.value == pytest.approx(changes.mean())
    # Student's t with 29 degrees of freedom, 97.5%.
    assert found.high - found.value == pytest.approx(2.045 * changes.std(ddof=1) / 30**0.5, rel=1e-3)
    alone = gain(clusters(champion[:1], changed(champion[:1], 0.2)))
    assert (alone.low, alone.value, alone.high) == pytest.approx((0.2, 0.2, 0.2))  # which has no interval


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"domain": "code"}, '"chat2-0" is of domain .chat. and .code.'),
        ({"cluster": ""}, "of cluster 'chat2' and ''"),
        ({"weight": 0.5}, '"chat2-0" is of weight 1.0 and 0.5'),
        ({"id": "chat2-1"}, "unmatched: chat2-0"),
        ({"id": "chat1-0"}, "each id once"),
    ],
)
def test_lists_that_do_not_match_are_refused(other: dict[str, Any], fault: str) -> None:
    scores = window(1, 1, 1)
    with pytest.raises(ValueError, match=fault):
        clusters(scores, [*scores[:-1], scores[-1].model_copy(update=other)])
    for first in ([], [*scores, scores[0]]):
        with pytest.raises(ValueError, match="at least one conversation, and each id once"):
            clusters(first, scores)
