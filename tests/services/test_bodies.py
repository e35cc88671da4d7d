import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from models.serving import Limits
from services.access import Caller, RequestError
from services.bodies import bounded
from tests.services.asgi import Answer, ask

pytestmark = pytest.mark.anyio

LIMITS = Limits(max_body_bytes=10, body_timeout_s=0.1)


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
