"""Requests are a domain's first ones that were not sent, and their sums are by hand."""

from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.client import Answer, Client
from models.recipe import load_recipe
from models.sources import Message
from tasks.select_data import choose_more, choose_prompts
from tasks.send_traffic import choose_requests, send_traffic, sent_before, summarise
from tests.infra.collector import running
from tests.infra.test_client import Handler, url_of


def answer(status: str, **told: object) -> Answer:
    return Answer(prompt_id="p", domain="code", status=status, sent_s=0.0, seconds=1.0, **told)


def test_answers_are_summed_up_and_failures_counted_by_their_name() -> None:
    ok = answer("ok", num_tokens=8, draft_version="7", num_steps=3, num_accepted=4, num_looked_up=3)
    report = summarise([ok, answer("http 503"), answer("truncated", num_tokens=5), answer("http 503")], seconds=2.0)
    assert (report.num_requests, report.num_ok, report.tau, report.tokens_per_s) == (4, 1, pytest.approx(7 / 3), 4.0)
    assert report.failures == {"http 503": 2, "truncated": 1}
    assert report.draft_versions == {"7": 1}
    assert report.taus() == "τ 2.333: 1 + 0.333 by the draft + 1.000 by look-up, tokens a step"


def test_without_a_verification_step_there_is_no_tau() -> None:
    report = summarise([answer("APIConnectionError")], 1.0)
    assert (report.tau, report.taus()) == (None, "τ none")


def test_requests_that_were_not_sent_come_first_the_recipes_own_and_then_others_of_their_groups() -> None:
    recipe = load_recipe("tiny")
    own = choose_prompts("chat", recipe.traffic["chat"], recipe.seed)["requests"]
    assert choose_requests(recipe, "chat", 0, ()) == own
    assert choose_requests(recipe, "chat", 2, {own[0].id}) == own[1:3]
    others = choose_requests(recipe, "chat", 0, {prompt.id for prompt in own})
    assert len(others) == len(own)
    assert not {prompt.id for prompt in others} & {prompt.id for prompt in own}


def test_more_requests_than_a_domain_has_left_are_refused() -> None:
    recipe = load_recipe("tiny")
    pool = choose_more("chat", recipe.traffic["chat"], recipe.seed, "requests")
    sent = {prompt.id for prompt in pool[3:]}
    assert choose_requests(recipe, "chat", 0, sent) == pool[:3]
    for wanted, given, told in (
        (4, sent, "3 requests .* that were not sent before, wanted 4; --repeat sends"),
        (0, {prompt.id for prompt in pool}, "0 requests .* that were not sent before, wanted 32; --repeat sends"),
        (len(pool) + 1, (), f'{len(pool)} requests of domain "chat", wanted {len(pool) + 1}$'),
    ):
        with pytest.raises(ValueError, match=f"recipe tiny has {told}"):
            choose_requests(recipe, "chat", wanted, given)


def test_a_home_remembers_the_prompts_that_were_answered_and_no_others(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    first, second = choose_requests(recipe, "chat", 2, sent_before(tmp_path))
    refused = second.model_copy(update={"messages": (Message(role="user", content="refuse"),)})
    seen: list[Answer] = []
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        server.asked = []
        send_traffic.fn(Client(url_of(server)), [first, refused], recipe.traffic, 4, 2, tmp_path, seen.append)
    assert sorted(answer.status for answer in seen) == ["http 503", "ok"]
    assert sent_before(tmp_path) == {first.id}
