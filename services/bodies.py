"""Bodies of requests: read whole, within bytes and seconds, once somebody's key was checked.

A body is held until its request was answered. What all of them hold together is bounded, and what those of one key hold
by half of that, so that no key can keep another's out.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.serving import Limits
from services.access import RequestError

FULL = RequestError(503, "the requests that are being answered are too large together; ask again", code="overloaded")
TOO_LARGE = "the requests of this key that are being answered are too large together; ask again"
FULL_OF_KEY = RequestError(429, TOO_LARGE, code="rate_limit_exceeded")


def bounded(app: ASGIApp, limits: Limits) -> ASGIApp:
    """Return `app` with each request's body read before it, see `read_body`; one body fits in any case."""
    most = max(limits.max_held_bytes, limits.max_body_bytes)
    most_of_key = max(limits.max_held_bytes // 2, limits.max_body_bytes)
    held: Counter[str | None] = Counter()

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        key, num_bytes = getattr(scope.get("redraft.caller"), "key", None), 0

        def came(more: int) -> None:
            nonlocal num_bytes
            if key is not None and held[key] + more > most_of_key:
                raise FULL_OF_KEY
            if held.total() + more > most:
                raise FULL
            held[key] += more
            num_bytes += more

        try:
            await app(scope, await read_body(Headers(scope=scope), receive, limits, came), send)
        finally:
            held[key] -= num_bytes
            if not held[key]:
                del held[key]

    return whole


async def read_body(
    headers: Headers, receive: Receive, limits: Limits, came: Callable[[int], None] = lambda _: None
) -> Receive:
    """Read a whole body; `came` is told of the bytes of each part, and may refuse them.

    What is returned hands out the body, then whatever comes, so that a client's leaving is still seen.
    """
    max_bytes, timeout_s, body = limits.max_body_bytes, limits.body_timeout_s, bytearray()
    too_large = RequestError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit():
        raise RequestError(400, "Content-Length is not a number")
    if len(declared) > 18 or int(declared) > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError(400, "the client left before the body was complete")
                part = message.get("body", b"")
                if len(body) + len(part) > max_bytes:
                    raise too_large
                came(len(part))
                body += part
                if not message.get("more_body", False):
                    return _replayed(bytes(body), receive)
    except TimeoutError as error:
        raise RequestError(408, f"the body took longer than {timeout_s:g} s") from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
