import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.access import RequestError
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


def test_only_the_usage_chunk_is_changed() -> None:
    text, usage = (
        frame({"choices": [{"delta": {"content": "a"}}]}),
        frame({"choices": [], "usage": {"total_tokens": 3}}),
    )
    got, ends = collect(frames(text, usage, "data: [DONE]\n\n"))
    assert got[0] == text
    assert json.loads(got[1].removeprefix("data: "))["usage"] == {"total_tokens": 3, "redraft": USAGE}
    assert got[2] == "data: [DONE]\n\n"
    assert ends == 1


@pytest.mark.parametrize(
    ("chunk", "usage"), [({"choices": [], "usage": {"total_tokens": 3}}, None), ({"choices": []}, USAGE)]
)
def test_a_chunk_stays_as_it_is_without_a_usage_or_what_to_add(chunk: dict[str, Any], usage: Any) -> None:
    sent = [frame({"choices": [1]}), frame(chunk), "data: [DONE]\n\n"]
    assert collect(frames(*sent), usage=usage)[0] == sent


def test_an_error_before_the_first_chunk_is_a_status() -> None:
    with pytest.raises(RequestError) as refused:
        collect(frames(frame({"error": {"code": 400, "message": "inner"}}), "data: [DONE]\n\n"))
    assert (refused.value.status, refused.value.message) == (400, "told")


def test_an_error_frame_in_the_middle_is_rewritten() -> None:
    got, ends = collect(frames(frame({"choices": [1]}), frame({"error": {"code": 500, "message": "swordfish"}})))
    assert json.loads(got[1].removeprefix("data: "))["error"]["message"] == "told"
    assert ends == 1


def test_a_stream_that_breaks_ends_with_an_error_frame_and_done() -> None:
    got, ends = collect(frames(frame({"choices": [1]}), error=RuntimeError("swordfish")))
    assert json.loads(got[1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert got[2] == "data: [DONE]\n\n"
    assert "swordfish" not in "".join(got)
    assert ends == 1


def test_a_client_that_leaves_closes_the_source() -> None:
    source = frames(*[frame({"choices": [1]})] * 5)
    got, ends = collect(source, take=2)
    assert (len(got), ends) == (2, 1)
    with pytest.raises(StopAsyncIteration):
        asyncio.run(anext(source))


def test_a_source_that_fails_at_once_tells_the_end() -> None:
    ends: list[None] = []
    with pytest.raises(RuntimeError, match="at once"):
        asyncio.run(opened(frames(error=RuntimeError("at once")), refuse, lambda: None, lambda: ends.append(None)))
    assert len(ends) == 1


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


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("path", OTHERS)
def test_an_error_is_told_as_the_streams_api_does_and_ends_it(path: str, breaks: bool) -> None:
    failure = [] if breaks else [frame({"error": {"code": 500, "message": "swordfish"}})]
    source = frames(
        named("start", {}), named("delta", {}), *failure, error=RuntimeError("swordfish") if breaks else None
    )
    got, _ = collect(source, path=path)
    message = "the server failed to answer this request" if breaks else "told"
    code = "internal_error" if breaks else None
    wanted = {
        "/v1/responses": {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 2},
        "/v1/messages": {"type": "error", "error": {"type": "api_error", "message": message}},
    }
    head, _, data = got[2].partition("data: ")
    assert (head, json.loads(data), len(got)) == ("event: error\n", wanted[path], 3)
