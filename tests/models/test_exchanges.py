"""What came back from OpenAI's API, in chunks, events and Batch files."""

import json
import random
from typing import Any

import pytest

from models.exchanges import paired, read_response
from models.rowfiles import Row, Unusable


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    end = {"finish_reason": finish, "stop_reason": None} if finish else {}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **end}]}


CALL = {"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"x"'}}
CHUNKS = [
    {**chunk(role="assistant", content=""), "prompt_token_ids": [1, 2]},
    chunk(content="he"),
    chunk(content="llo\u2028", reasoning="h"),
    chunk(tool_calls=[CALL]),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    chunk("stop"),
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
]
EVENTS = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in CHUNKS) + "data: [DONE]\n\n"


@pytest.mark.parametrize("told", [CHUNKS, EVENTS, ": ping\n\n" + EVENTS.replace("\n", "\r\n"), {"body": EVENTS}])
def test_a_stream_is_read_as_the_whole_response(told: Any) -> None:
    response = read_response(told if not isinstance(told, dict) else told["body"])
    (choice,) = response["choices"]
    assert choice["message"]["content"] == "hello\u2028"
    assert choice["message"]["reasoning"] == "h"
    assert [one["function"] for one in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert response["prompt_token_ids"] == [1, 2]
    assert response["usage"]["completion_tokens"] == 3


def test_token_ids_of_a_stream_are_joined() -> None:
    first, second = chunk(content="a"), chunk("length", content="b")
    first["choices"][0]["token_ids"], second["choices"][0]["token_ids"] = [1, 2], [3]
    assert read_response([first, second])["choices"][0]["token_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (CHUNKS[:5], "broken off"),
        ([*CHUNKS[:2], {"error": {"message": "x"}}], "that failed"),
        ([{"choices": [{"index": 1, "delta": {}}]}], "with n"),
        (3, "with wrong fields"),
        ({"error": "x"}, "that failed"),
    ],
)
def test_a_response_that_did_not_come_whole_is_not_used(told: Any, reason: str) -> None:
    with pytest.raises(Unusable) as fault:
        read_response(told)
    assert fault.value.reason == reason


def batch(count: int) -> list[Row]:
    asked: list[Row] = [{"custom_id": str(i), "url": "/v1", "body": {"messages": i}} for i in range(count)]
    return asked + [{"custom_id": str(i), "response": {"body": i}, "error": None} for i in range(count)]


def pair(rows: list[Row]) -> tuple[list[Row], list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    placed = [(f"line {number}", row) for number, row in enumerate(rows, start=1)]
    return [row for _, row in paired(placed, lambda where, fault: told.append((where, fault.reason)))], told


def test_the_halves_of_a_batch_find_each_other_in_any_order() -> None:
    rows = [*batch(9), {"messages": []}]
    random.Random(0).shuffle(rows)
    found, told = pair(rows)
    assert not told
    assert sorted(one["request"]["messages"] for one in found if "request" in one) == list(range(9))
    assert all(one["request"]["messages"] == one["response"]["body"] for one in found if "request" in one)
    assert {"messages": []} in found
    assert len(found) == 10


def test_a_half_passes_as_it_is_and_a_failed_request_is_paired_with_its_error() -> None:
    asked, answered = batch(1)
    assert pair([asked]) == ([asked], [])
    assert pair([answered]) == ([answered], [])
    asked = batch(1)[0]
    (row,), _ = pair([asked, {"custom_id": "0", "response": None, "error": {"code": "x"}}])
    assert row["error"] == {"code": "x"}


def test_a_name_of_two_requests_pairs_nothing_but_may_be_used_again_after_its_pair() -> None:
    (asked, answered), other = batch(1), {"custom_id": "0", "body": {"messages": "other"}}
    again = {"custom_id": "0", "response": {"body": "again"}}
    twice = [(f"line {number}", "with a custom_id given twice") for number in (1, 2, 3)]
    assert pair([asked, other, answered]) == ([], twice)
    assert pair([answered, again, asked]) == ([], twice)
    found, told = pair([asked, answered, other, again])
    assert not told
    assert [(one["request"]["messages"], one["response"]["body"]) for one in found] == [(0, 0), ("other", "again")]
