"""Mixed traffic and the report over refreshes, by hand."""

from collections import Counter
from typing import Any

from models.sources import Message, Prompt
from models.types import Estimate, GateParams, GateReport, GateTest
from tests.benchmarks.refreshes import KEYS, mixed, table, tau_of


def prompts(domain: str, count: int) -> list[Prompt]:
    texts = (f"{domain} {number}" for number in range(count))
    return [Prompt(messages=(Message(role="user", content=text),), domain=domain, group=text) for text in texts]


def test_both_keys_ask_every_domain_and_the_first_twice_as_much() -> None:
    asked = mixed({domain: prompts(domain, 30) for domain in ("chat", "code", "math")})
    assert [prompt.domain for _, prompt in asked[:4]] == ["chat", "code", "math", "chat"]
    assert Counter((key, prompt.domain) for key, prompt in asked) == {
        (key, domain): count for key, count in zip(KEYS, (20, 10), strict=True) for domain in ("chat", "code", "math")
    }


def state(champion: int, accepted: int) -> dict[str, Any]:
    answers = [
        {
            "prompt_id": f"{domain} {number}",
            "domain": domain,
            "token_ids": list(range(9)),
            "drafted_per_step": [3, 3],
            "accepted_per_step": [accepted, number % 2],
        }
        for domain in ("chat", "code")
        for number in range(10)
    ]
    return {"champion": champion, "answers": answers}


def verdict(outcome: Any, reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    limits = GateParams(num_resamples=100)
    test = GateTest(
        parent=1,
        rows=(1, 9),
        gain=Estimate(value=0.1, low=0.05, high=0.2),
        alpha=0.05,
        test_index=1,
        params=limits,
        left_out=(),
    )
    report = GateReport(verdict=outcome, reasons=reasons, num_draft_tokens=3, domains={}, test=test)
    return report.model_dump(mode="json")


def test_every_refresh_is_told_with_its_verdict_and_tau_by_domain() -> None:
    gates = [verdict("passed"), verdict("undecided", ("learning",))]
    states = [state(1, 0), state(2, 1), state(2, 1)]
    found = {
        "domains": {domain: [tau_of(one, domain).model_dump() for one in states] for domain in ("chat", "code")},
        "champions": [one["champion"] for one in states],
        "refreshes": [{"seconds": 9.0, "newest": 2 + number, "gate": gate} for number, gate in enumerate(gates)],
    }
    assert [tau["value"] for tau in found["domains"]["code"]] == [1.25, 1.75, 1.75]
    rows = table(found)
    assert [row[:3] for row in rows[1:]] == [["refresh 1", "9", "passed"], ["refresh 2", "9", "undecided"]]
    assert [row[4] for row in rows] == ["1", "2", "2"]
