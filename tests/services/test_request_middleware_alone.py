"""The layer in front of Serve's proxy, without Serve; test_request_middleware.py asks it over HTTP."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.keys import add_key
from models.serving import Limits
from services.access import Keys
from services.request_middleware import HEADER_BYTES, HEADER_LINES, RequestMiddleware
from tests.services import asgi

MARK = {"x-redraft-request": "1"}
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-redraft-request", b"1")]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    found = {"bytes": len(await request.body()), "headers": dict(request.headers)}
    await JSONResponse(found, headers=MARK)(scope, receive, send)


def ask(
    app: ASGIApp = echo,
    path: str = "/v1/models",
    headers: Sequence[tuple[str, bytes]] = (),
    chunks: Sequence[bytes] = (b"",),
    keys: Keys | None = None,
) -> asgi.Answer:
    """Send one request through the layer."""
    limits = Limits(max_body_bytes=10, body_timeout_s=0.1)
    layer = RequestMiddleware(app, keys or Keys(Path("none.json"), loopback=True), limits)
    return asyncio.run(asgi.ask(layer, chunks, path, [("Host", b"localhost"), *headers]))


def error_of(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body)["error"])


def test_a_body_is_read_here_within_its_limits_once_a_key_was_checked(tmp_path: Path) -> None:
    assert json.loads(ask(chunks=[b"12345", b"67890"])[1])["bytes"] == 10
    status, body, _ = ask(chunks=[b"x" * 11])
    assert (status, error_of(body)["code"]) == (413, "body_too_large")
    add_key(tmp_path / "keys.json", "a-client", "client")
    keys = Keys(tmp_path / "keys.json", loopback=True)
    status, body, _ = ask(chunks=[b"x" * 11], keys=keys)
    assert (status, error_of(body)["code"]) == (401, "invalid_api_key")
    assert ask(path="/readyz", keys=keys)[0] == 200


def test_only_the_headers_that_mean_something_here_pass() -> None:
    sent = [
        ("X-Request-Id", b"\xff"),
        ("X-Request-Timeout-Seconds", b"0.01"),
        ("X-Data-Parallel-Rank", b"7"),
        ("Authorization", b"Bearer \xe9"),
        ("X-Redraft-Domain", b"chat"),
    ]
    passed = json.loads(ask(headers=sent)[1])["headers"]
    assert passed == {"host": "localhost", "authorization": "Bearer \u00e9", "x-redraft-domain": "chat"}


@pytest.mark.parametrize(
    "headers",
    [[("X-A", b"x" * HEADER_BYTES)], [(f"X-{number}", b"x") for number in range(HEADER_LINES)]],
    ids=["bytes", "lines"],
)
def test_too_many_bytes_or_lines_of_headers_are_400_before_anyone_looks_at_the_key(
    headers: list[tuple[str, bytes]], tmp_path: Path
) -> None:
    add_key(tmp_path / "keys.json", "a-client", "client")
    status, body, _ = ask(headers=headers, keys=Keys(tmp_path / "keys.json", loopback=True))
    assert (status, error_of(body)["code"]) == (400, "headers_too_large")
    few = [(name, value[: HEADER_BYTES // 2]) for name, value in headers[: HEADER_LINES - 1]]
    assert ask(headers=few)[0] == 200


def test_serves_own_routes_are_not_there(tmp_path: Path) -> None:
    status, body, _ = ask(path="/-/routes")
    assert (status, error_of(body)["code"]) == (401, "invalid_api_key")
    key = add_key(tmp_path / "keys.json", "an-operator", "operator")
    keys, headers = Keys(tmp_path / "keys.json", loopback=True), [("Authorization", f"Bearer {key}".encode())]
    status, body, _ = ask(path="/-/routes", keys=keys, headers=headers)
    assert (status, error_of(body)["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("status", "code"), [(503, "overloaded"), (500, "engine_unavailable"), (404, "engine_unavailable")]
)
def test_what_serve_says_in_its_own_words_is_a_503_in_openais_shape(status: int, code: str) -> None:
    told, body, headers = ask(PlainTextResponse("actor 7 died: swordfish", status))
    assert (told, error_of(body)["code"], headers["retry-after"]) == (503, code, "5")
    assert b"swordfish" not in body


def test_a_request_that_nobody_answered_or_that_broke_the_proxy_is_a_503() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise UnicodeDecodeError("utf-8", b"swordfish", 0, 1, "invalid")

    for app in (silent, broken):
        status, body, _ = ask(app)
        assert (status, error_of(body)["code"]) == (503, "engine_unavailable")
        assert b"swordfish" not in body


def test_a_stream_that_was_cut_ends_with_an_error_frame_and_a_whole_one_is_left_alone() -> None:
    def streaming(*frames: tuple[bytes, bool]) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            for body, more in frames:
                await send({"type": "http.response.body", "body": body, "more_body": more})

        return app

    _, cut, _ = ask(streaming((b"data: 1\n\n", True)))
    first, error, done = cut.decode().rstrip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    name, told = error.split("\n")  # Anthropic's client looks for the event, OpenAI's for the data
    assert (name, json.loads(told.removeprefix("data: "))["error"]["code"]) == ("event: error", "replica_lost")
    assert ask(streaming((b"data: 1\n\n", True), (b"", False)))[1] == b"data: 1\n\n"


def test_an_answer_that_is_no_stream_is_never_completed_with_something_else() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-redraft-request", b"1")]})
        await send({"type": "http.response.body", "body": b'{"half', "more_body": True})

    assert ask(app)[1] == b'{"half'
