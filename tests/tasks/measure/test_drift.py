"""When a way has followed a shift, and what it forgot meanwhile, by hand."""

from pathlib import Path
from typing import Any

import pytest

from models.core.evaluation.acceptance import Trace
from models.core.learning.hidden import Sample
from tasks.measure.drift import FROZEN, OURS, Stream, file_traffic, make_report

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
    assert found.picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("second", "near", "code"),
    [
        (row(1, 2), None, 0),
        (row(2, 2, 700.0), {"requests": 6, "seconds": 700.0}, 0),
        (row(2, 1), {"requests": 6, "seconds": 0.0}, -1),
    ],
)
def test_what_is_late_or_forgotten_is_told(tmp_path: Path, second: dict[str, Any], near: Any, code: float) -> None:
    ours = report(tmp_path, [row(0, 2), second, row(0, 2)]).figures["ways"][OURS]
    assert (ours["near"], ours["changes"]["code"]["value"]) == (near, code)


@pytest.mark.parametrize(
    ("given", "told"), [("math", "names no domain and file"), ("math=none.jsonl", "there is no file none.jsonl")]
)
def test_what_names_no_file_is_refused(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        file_traffic(given, 10, 10)
