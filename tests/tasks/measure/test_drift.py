"""When a way has followed a shift, and what it forgot meanwhile, by hand."""

from pathlib import Path
from typing import Any

import pytest

from models.evaluation.acceptance import Trace
from models.learning.hidden import Sample
from tasks.measure.drift import FROZEN, OURS, Stream, make_report

REQUESTS = [Sample(f"{number}", "math", [1], [2, 3, 4]) for number in range(9)]
STREAM = Stream("math", "code", [REQUESTS[:3], REQUESTS[3:6], REQUESTS[6:]], 2, [], [])


def row(math: int, code: int, seconds: float = 0.0) -> dict[str, Any]:
    """A draft of which each step takes so many tokens of either domain's answers."""
    traces = [
        Trace(request_id=f"{domain} {n}", token_ids=(1,) * 9, drafted=(3, 3), accepted=(taken, taken), domain=domain)
        for domain, taken in (("math", math), ("code", code))
        for n in range(4)
    ]
    return {"traces": [one.model_dump(mode="json") for one in traces], "seconds": seconds, "verdict": "passed"}


def report(tmp_path: Path, ours: list[dict[str, Any]], num_requests: int = 3) -> Any:
    start, picture = row(0, 2), tmp_path / "drift.png"
    return make_report(start, row(2, 0), {FROZEN: [start] * 3, OURS: ours}, STREAM, num_requests, picture)


def test_a_way_has_followed_when_it_has_nine_tenths_of_the_specialists_acceptance(tmp_path: Path) -> None:
    found = report(tmp_path, [row(1, 2, 10.0), row(2, 2, 20.0), row(2, 3, 5.0)])
    ours, frozen = found.figures["ways"][OURS], found.figures["ways"][FROZEN]
    assert ours["near"] == {"requests": 6, "seconds": 30.0}
    assert (ours["tau"]["value"], ours["changes"]["code"]["value"], ours["back"]["value"]) == (3.0, 0.0, 4.0)
    assert (frozen["near"], frozen["tau"]["value"], frozen["back"]["value"]) == (None, 1.0, 3.0)
    assert found.verdict == (
        "90% of the specialist's τ is reached after 6 requests and 30 s, which meets the bar (200 requests and 600 s); "
        "the other domains meet theirs (within 3%)."
    )
    assert found.picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (row(1, 2), "is not reached, which misses the bar (200 requests and 600 s); the other domains meet"),
        (
            row(2, 2, 700.0),
            "after 6 requests and 700 s, which misses the bar (200 requests and 600 s); the other domains meet",
        ),
        (row(2, 1), "after 6 requests and 0 s, which meets the bar (200 requests and 600 s); the other domains miss"),
    ],
)
def test_what_is_late_or_forgotten_misses_its_bar(tmp_path: Path, second: dict[str, Any], told: str) -> None:
    assert told in report(tmp_path, [row(0, 2), second, row(0, 2)]).verdict


@pytest.mark.parametrize(("num_requests", "found"), [(100, "meets"), (101, "misses")])
def test_more_than_two_hundred_requests_miss_the_bar_however_few_seconds(
    tmp_path: Path, num_requests: int, found: str
) -> None:
    verdict = report(tmp_path, [row(1, 2), row(2, 2), row(0, 2)], num_requests).verdict
    assert f"after {2 * num_requests} requests and 0 s, which {found} the bar" in verdict
