"""Which domains are judged, and against what; what becomes of a draft that did not pass."""

import pytest

from models.core.evaluation.paired import Score
from models.types import GateParams
from tasks.gate_draft import best_of, score_floors
from tests.conftest import judge


def scores(accepted: float, *domains: str) -> list[Score]:
    return [Score(id=domain, domain=domain, steps=10, accepted=accepted) for domain in domains]


def test_each_domain_is_held_to_its_own_best_draft():
    best = {"chat": scores(5.0, "chat", "code"), "code": scores(8.0, "chat", "code")}
    floors = score_floors(best, scores(8.0, "chat", "code"), GateParams(num_resamples=100), seed=0)
    assert {domain: floor.reference for domain, floor in floors.items()} == {"chat": 1.5, "code": 1.8}
    assert {domain: floor.tau_after for domain, floor in floors.items()} == {"chat": 1.8, "code": 1.8}


def test_a_domain_without_conversations_here_is_not_judged():
    past = scores(5.0, "chat")
    assert score_floors({"chat": past, "code": past}, past, GateParams(num_resamples=100), seed=0).keys() == {"chat"}


def test_a_past_draft_is_the_reference_only_where_it_beats_the_champion_on_the_same_conversations():
    champion, past = scores(5.0, "chat", "code"), [*scores(6.0, "chat"), *scores(4.0, "code")]
    assert best_of("chat", [champion, past]) is past
    assert best_of("code", [champion, past]) is champion
    assert best_of("chat", [champion]) is champion


@pytest.mark.parametrize(
    ("gains", "learns", "gate", "reason"),
    [
        ({"chat": 0.3}, True, "passed", ""),
        ({"chat": 0.0}, True, "undecided", "learning: gain +0.000 tokens a step, at least -0."),
        ({"chat": 0.6, "code": -0.2}, True, "undecided", "learning: gain +0.200 tokens a step, at least +0."),
        ({"chat": -0.35}, True, "refused", "a loss is shown"),
        ({"chat": 0.0}, False, "refused", "no gain shown"),
        ({"chat": 0.6, "code": -0.2}, False, "refused", 'domain "code" may lose'),
    ],
)
def test_only_what_is_shown_worse_or_can_not_learn_is_refused(gains, learns, gate, reason):
    report = judge(gains, learns=learns).report
    assert report.verdict == gate
    assert "; ".join(report.reasons).startswith(reason)
    assert ('domain "code" may lose' in "; ".join(report.reasons)) == ("code" in gains)
