"""The layer in front of Serve's proxy, without Serve; test_request_middleware.py asks it over HTTP."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.keys import add_key
from models.serving import Limits
from services.access import Keys
from services.reverse_proxy import HEADER_BYTES, HEADER_LINES, RequestMiddleware
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


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Those of a home in which a client has one."""
    add_key(tmp_path / "keys.json", "a-client", "client")
    return Keys(tmp_path / "keys.json", loopback=True)


def require_error(answer: asgi.Answer, status: int, code: str) -> None:
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code)
    assert b"swordfish" not in answer.body


def test_a_body_is_read_here_within_its_limits_once_a_key_was_checked(keys: Keys) -> None:
    assert json.loads(ask(chunks=[b"12345", b"67890"]).body)["bytes"] == 10
    require_error(ask(chunks=[b"x" * 11]), 413, "body_too_large")
    require_error(ask(chunks=[b"x" * 11], keys=keys), 401, "invalid_api_key")
    assert ask(path="/readyz", keys=keys).status == 200


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
def test_too_many_bytes_or_lines_of_headers_are_400_before_keys(headers: list[tuple[str, bytes]], keys: Keys) -> None:
    require_error(ask(headers=headers, keys=keys), 400, "headers_too_large")
    few = [(name, value[: HEADER_BYTES // 2]) for name, value in headers[: HEADER_LINES - 1]]
    assert ask(headers=few).status == 200


def test_serves_own_routes_are_not_there(tmp_path: Path) -> None:
    require_error(ask(path="/-/routes"), 401, "invalid_api_key")
    key = add_key(tmp_path / "keys.json", "an-operator", "operator").encode()
    keys = Keys(tmp_path / "keys.json", loopback=True)
    assert ask(path="/-/routes", keys=keys, headers=[("Authorization", b"Bearer " + key)]).status == 404


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise UnicodeDecodeError("utf-8", b"swordfish", 0, 1, "invalid")


@pytest.mark.parametrize(
    ("app", "code"),
    [
        (PlainTextResponse("actor 7 died: swordfish", 503), "overloaded"),
        *((PlainTextResponse("actor 7 died: swordfish", status), "engine_unavailable") for status in (500, 404)),
        (silent, "engine_unavailable"),
        (broken, "engine_unavailable"),
    ],
    ids=["503", "500", "404", "no answer", "a broken proxy"],
)
def test_what_serve_says_in_its_own_words_or_does_not_say_is_a_503_in_openais_shape(app: ASGIApp, code: str) -> None:
    answer = ask(app)
    require_error(answer, 503, code)
    assert answer.headers.get("retry-after") == "5"


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
