"""Mixed traffic and the report over refreshes, by hand."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from models.sources import Message, Prompt
from models.types import Estimate, GateParams, GateReport, GateTest
from tasks.measure.refreshes import KEYS, file_traffic, make_report, mixed
from tasks.select_data import choose_more


def prompts(domain: str, count: int) -> list[Prompt]:
    texts = (f"{domain} {number}" for number in range(count))
    return [Prompt(messages=(Message(role="user", content=text),), domain=domain, group=text) for text in texts]


def test_both_keys_ask_every_domain_and_the_first_twice_as_much() -> None:
    asked = mixed({domain: prompts(domain, 30) for domain in ("chat", "code", "math")})
    assert [prompt.domain for _, prompt in asked[:4]] == ["chat", "code", "math", "chat"]
    assert Counter((key, prompt.domain) for key, prompt in asked) == {
        (key, domain): count for key, count in zip(KEYS, (20, 10), strict=True) for domain in ("chat", "code", "math")
    }


def test_a_further_domain_comes_out_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "domain": "sums"} for n in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain, traffic = file_traffic(f"math={file}", 60)
    assert {prompt.domain for prompt in choose_more(domain, traffic, 0, "requests", 60)} == {"math"}


@pytest.mark.parametrize(
    ("given", "told"), [("math", "names no domain and file"), ("math=none.jsonl", "there is no file none.jsonl")]
)
def test_what_names_no_file_is_refused(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        file_traffic(given, 10)


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


def test_every_refresh_is_told_with_its_verdict_and_tau_by_domain(tmp_path: Path) -> None:
    gates = [verdict("passed"), verdict("undecided", ("learning",))]
    refreshes = [{"seconds": 9.0, "newest": 2 + number, "gate": gate} for number, gate in enumerate(gates)]
    report = make_report([state(1, 0), state(2, 1), state(2, 1)], refreshes, tmp_path / "r.png")
    assert report.failures == []
    assert report.figures["champions"] == [1, 2, 2]
    assert [tau["value"] for tau in report.figures["domains"]["code"]] == [1.25, 1.75, 1.75]
    assert [row[:3] for row in report.grids[0].rows][1:] == [
        ["refresh 1", "9", "passed"],
        ["refresh 2", "9", "undecided"],
    ]
    assert "of 2 refreshes 2 were judged and 1 passed" in report.verdict
    assert "2: learning" in report.notes[0]


def test_a_refresh_that_found_too_few_rows_is_a_failure(tmp_path: Path) -> None:
    refresh = {"seconds": 9.0, "newest": 1, "gate": None}
    report = make_report([state(1, 0), state(1, 0)], [refresh], tmp_path / "r.png")
    assert report.failures == ["refresh 1 had too few rows"]
