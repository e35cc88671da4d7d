"""A replica's own server on a Unix socket; test_reverse_proxy.py has HAProxy before it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from models.serving import Limits
from services.access import INTERNAL_ERROR, Caller, RequestError
from services.http_server import Listener, bounded, listening, opened
from tests.services.asgi import Answer, ask

pytestmark = pytest.mark.anyio
LIMITS = Limits(max_body_bytes=10, body_timeout_s=0.1)
USAGE = {"draft_version": "3", "drafted": 6, "accepted": 2, "steps": 2, "mean_accepted_length": 2.0}


def client(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://replica")


async def test_it_listens_for_as_long_as_the_apps_lifespan_lasts(tmp_path: Path) -> None:
    path, ended = tmp_path / "socket", asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            ended.set()
        else:
            await PlainTextResponse("here")(scope, receive, send)

    told, said = asyncio.Queue[Message](), asyncio.Queue[Message]()
    lifespan = asyncio.create_task(listening(app, path, 1.0)({"type": "lifespan"}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    await said.get()
    assert path.stat().st_mode & 0o777 == 0o600
    async with client(path) as asked:
        assert (await asked.get("/")).text == "here"
    await told.put({"type": "lifespan.shutdown"})
    await lifespan
    assert ended.is_set()
    assert not path.exists()


async def test_the_next_one_takes_its_place_and_what_it_accepted_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    accepted, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        accepted.set()
        await go_on.wait()
        await PlainTextResponse("first")(scope, receive, send)

    first = await Listener.start(slow, path, 5.0)
    async with client(path) as asked, client(path) as other:
        answer = asyncio.create_task(asked.get("/"))
        await accepted.wait()
        second = await Listener.start(PlainTextResponse("second"), path, 1.0)
        ending = asyncio.create_task(first.close())
        assert (await other.get("/")).text == "second"
        go_on.set()
        assert (await answer).text == "first"
        await ending
        assert path.exists()
    await second.close()
    assert not path.exists()


async def count(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"bytes": len(await Request(scope, receive).body())})(scope, receive, send)


async def measured(chunks: Sequence[bytes] = (b"",), length: bytes = b"", stall: bool = False) -> Any:
    """Send one request through the layer and return the answer."""
    headers = [("Content-Length", length)] if length else []
    return json.loads((await ask(bounded(count, LIMITS), chunks, headers=headers, stall=stall)).body)


@pytest.mark.parametrize(
    ("chunks", "length", "stall", "told"),
    [
        ([b""], b"11", False, (413, "body_too_large")),
        ([b"x" * 6, b"x" * 5], b"", False, (413, "body_too_large")),
        ([b""], b"9" * 5000, False, (413, "body_too_large")),
        ([b"1"], b"", True, (408, None)),
        *(([b""], length, False, (400, None)) for length in (b"-1", b"1e3", b"\xb2")),
    ],
    ids=["declared", "chunked", "absurd", "stalled", "negative", "exponent", "no digit"],
)
async def test_a_body_over_the_limits_or_of_no_length_is_refused_and_one_that_does_not_arrive_ends_the_connection(
    chunks: list[bytes], length: bytes, stall: bool, told: tuple[int, str | None]
) -> None:
    with pytest.raises(RequestError) as refused:
        await measured(chunks, length, stall)
    assert (refused.value.status, refused.value.code) == told
    assert (refused.value.response().headers.get("connection") == "close") == stall


async def test_a_body_of_the_limit_arrives_whole() -> None:
    assert await measured([b"12345", b"67890"]) == {"bytes": 10}


class Waiting:
    """An app of which each request is answered only when it is told to."""

    def __init__(self, limits: Limits) -> None:
        self.answer = asyncio.Event()
        self._app = bounded(self._wait, limits)

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await self.answer.wait()
        await JSONResponse({})(scope, receive, send)

    async def ask(self, key: str | None, *parts: bytes) -> "asyncio.Task[Answer]":
        caller = None if key is None else Caller(key, "client", "none")
        task = asyncio.ensure_future(ask(self._app, parts, **{"redraft.caller": caller}))
        for _ in range(5):
            await asyncio.sleep(0)
        return task

    async def refusal(self, key: str, *parts: bytes) -> tuple[int, str | None]:
        with pytest.raises(RequestError) as refused:
            await (await self.ask(key, *parts))
        return refused.value.status, refused.value.code


async def test_one_key_holds_half_of_what_may_be_held_and_another_gets_in() -> None:
    app = Waiting(Limits(max_body_bytes=10, max_held_bytes=40))
    held = [await app.ask("flooder", b"x" * 10), await app.ask("flooder", b"x" * 5, b"x" * 5)]
    assert await app.refusal("flooder", b"x") == (429, "rate_limit_exceeded")
    held += [await app.ask("other", b"x" * 10), await app.ask(None, b"x" * 9)]
    assert await app.refusal("third", b"x", b"x") == (503, "overloaded")
    assert not any(task.done() for task in held)
    app.answer.set()
    await asyncio.gather(*held)
    await asyncio.gather(*[await app.ask("flooder", b"x" * 10) for _ in range(2)])


async def test_one_body_of_the_largest_size_always_fits() -> None:
    app = Waiting(Limits(max_body_bytes=10, max_held_bytes=1))
    app.answer.set()
    await (await app.ask("a", b"x" * 10))


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
