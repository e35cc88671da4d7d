"""Summing scores up."""

import pytest

from models.core.evaluation.paired import Score
from tasks.measure_draft import first_report, summarise, tau_of

SCORES = [
    Score(id="a", domain="chat", steps=10, accepted=5),
    Score(id="b", domain="chat", steps=30, accepted=25),
    Score(id="c", domain="code", steps=4, accepted=8),
]


def test_tau_counts_every_step_once():
    assert tau_of(SCORES[:2]) == 1.75
    assert tau_of(SCORES) == 1 + 38 / 44


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="nothing to score"):
        tau_of([])


def test_each_domain_has_its_figure_and_interval():
    measured = summarise(SCORES, golden_tau=1.5, seed=0)
    assert measured.num_conversations == {"chat": 2, "code": 1}
    assert measured.tau["chat"].value == 1.75
    assert (measured.tau["chat"].low, measured.tau["chat"].high) == pytest.approx((1.5, 1 + 25 / 30))
    assert measured.coverage == {}  # of scores that don't tell how many tokens there were


def test_the_vocabularys_coverage_is_over_all_tokens_of_a_domain():
    told = {"a": (10, 9), "b": (30, 15), "c": (4, 4)}
    scores = [one.model_copy(update={"tokens": told[one.id][0], "covered": told[one.id][1]}) for one in SCORES]
    measured = summarise(scores, golden_tau=1.5, seed=0)
    assert measured.coverage == {"chat": 24 / 40, "code": 1.0}
    assert measured.metrics()["coverage/chat"] == 0.6
    assert first_report(measured, 3).domains["chat"].coverage == 0.6
