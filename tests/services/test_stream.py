import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.access import INTERNAL_ERROR, RequestError
from services.stream import opened

USAGE = {"draft_version": "3", "drafted": 6, "accepted": 2, "steps": 2, "mean_accepted_length": 2.0}


def frame(body: Any) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def refuse(body: dict[str, Any]) -> RequestError:
    return RequestError(body["error"]["code"], "told")


async def frames(*texts: str, error: Exception | None = None) -> AsyncGenerator[str, None]:
    for text in texts:
        yield text
    if error is not None:
        raise error


def collect(
    source: AsyncGenerator[str, None],
    take: int | None = None,
    usage: dict[str, Any] | None = USAGE,
    path: str = "/v1/chat/completions",
) -> tuple[list[str], int]:
    """Return the frames that came out (at most `take`, then the client leaves) and how often the end was told."""
    ends: list[None] = []

    async def run() -> list[str]:
        stream = await opened(source, refuse, lambda: usage, lambda: ends.append(None), path)
        got = []
        async for text in stream:
            got.append(text)
            if len(got) == take:
                await stream.aclose()
        return got

    return asyncio.run(run()), len(ends)


TEXT, TOTAL = frame({"choices": [{"delta": {"content": "a"}}]}), {"choices": [], "usage": {"total_tokens": 3}}
END = "data: [DONE]\n\n"
FAILURE = frame({"error": {"code": 500, "message": "swordfish"}})


def body_of(text: str) -> dict[str, Any]:
    """Return what an event tells."""
    return dict(json.loads(text.partition("data: ")[2]))


def test_only_the_usage_chunk_is_changed() -> None:
    got, ends = collect(frames(TEXT, frame(TOTAL), END))
    assert (got[0], got[2], ends) == (TEXT, END, 1)
    assert body_of(got[1])["usage"] == {"total_tokens": 3, "redraft": USAGE}


@pytest.mark.parametrize(("chunk", "usage"), [(TOTAL, None), ({"choices": []}, USAGE)])
def test_a_chunk_stays_as_it_is_without_a_usage_or_what_to_add(chunk: dict[str, Any], usage: Any) -> None:
    sent = [TEXT, frame(chunk), END]
    assert collect(frames(*sent), usage=usage)[0] == sent


def test_an_error_before_the_first_chunk_is_a_status_and_a_source_that_fails_at_once_tells_the_end() -> None:
    with pytest.raises(RequestError) as refused:
        collect(frames(frame({"error": {"code": 400, "message": "inner"}}), END))
    assert (refused.value.status, refused.value.message) == (400, "told")
    ends: list[None] = []
    with pytest.raises(RuntimeError, match="at once"):
        asyncio.run(opened(frames(error=RuntimeError("at once")), refuse, lambda: None, lambda: ends.append(None)))
    assert len(ends) == 1


def test_a_client_that_leaves_closes_the_source() -> None:
    source = frames(*[TEXT] * 5)
    got, ends = collect(source, take=2)
    assert (len(got), ends) == (2, 1)
    with pytest.raises(StopAsyncIteration):
        asyncio.run(anext(source))


def named(name: str, body: dict[str, Any]) -> str:
    return f"event: {name}\n{frame({'type': name, **body})}"


OTHERS = {
    "/v1/responses": ("response.completed", {"response": {"usage": {"input_tokens": 3}}}),
    "/v1/messages": ("message_delta", {"delta": {}, "usage": {"output_tokens": 3}}),
}


@pytest.mark.parametrize("path", OTHERS)
def test_of_another_api_only_the_event_with_the_usage_is_changed(path: str) -> None:
    name, body = OTHERS[path]
    start, text = named("start", {"usage": {}}), named("delta", {"text": f"event: {name}\n"})
    got, _ = collect(frames(start, text, named(name, body)), path=path)
    assert got[:2] == [start, text]
    head, _, data = got[2].partition("data: ")
    told = json.loads(data)
    assert (head, told["type"]) == (f"event: {name}\n", name)
    assert told.get("response", told)["usage"]["redraft"] == USAGE


BROKEN = [([FAILURE], None, "told", None), ([], RuntimeError("swordfish"), INTERNAL_ERROR.message, "internal_error")]


@pytest.mark.parametrize(("path", "rest"), [("/v1/chat/completions", [END]), *((path, []) for path in OTHERS)])
@pytest.mark.parametrize(("failure", "error", "message", "code"), BROKEN, ids=["a frame", "an exception"])
def test_an_error_is_told_as_the_streams_api_does_and_ends_it(
    path: str, rest: list[str], failure: list[str], error: Exception | None, message: str, code: str | None
) -> None:
    got, ends = collect(frames(TEXT, TEXT, *failure, *(rest if failure else []), error=error), path=path)
    wanted = {
        "/v1/chat/completions": RequestError(500, message, None, code).body(path),
        "/v1/responses": {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 2},
        "/v1/messages": {"type": "error", "error": {"type": "api_error", "message": message}},
    }
    assert (got[:2], body_of(got[2]), got[3:], ends) == ([TEXT, TEXT], wanted[path], rest, 1)
    assert got[2].startswith("event: error\n") == (path in OTHERS)
