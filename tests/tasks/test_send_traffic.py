"""Requests are a domain's first ones, and their sums are by hand."""

import pytest

from infra.client import Answer
from models.recipe import load_recipe
from tasks.send_traffic import choose_requests, summarise


def answer(status: str, **told: object) -> Answer:
    return Answer(prompt_id="p", domain="code", status=status, sent_s=0.0, seconds=1.0, **told)


def test_answers_are_summed_up_and_failures_counted_by_their_name() -> None:
    ok = answer("ok", num_tokens=8, draft_version="7", num_steps=3, num_accepted=4)
    report = summarise([ok, answer("http 503"), answer("truncated", num_tokens=5), answer("http 503")], seconds=2.0)
    assert (report.num_requests, report.num_ok, report.tau, report.tokens_per_s) == (4, 1, pytest.approx(7 / 3), 4.0)
    assert report.failures == {"http 503": 2, "truncated": 1}
    assert report.draft_versions == {"7": 1}


def test_without_a_verification_step_there_is_no_tau() -> None:
    assert summarise([answer("APIConnectionError")], 1.0).tau is None


def test_more_requests_than_a_domain_has_are_refused() -> None:
    recipe = load_recipe("tiny")
    count = recipe.traffic["chat"].num_requests
    assert len(choose_requests(recipe, "chat", 2)) == 2
    assert choose_requests(recipe, "chat", 0)[:2] == choose_requests(recipe, "chat", 2)
    with pytest.raises(ValueError, match=f'has {count} requests of domain "chat", got {count + 1}'):
        choose_requests(recipe, "chat", count + 1)
