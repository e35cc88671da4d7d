"""Bodies of requests: read whole, within bytes and seconds, once somebody's key was checked."""

import asyncio
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.serving import Limits
from services.access import Refusal


def bounded(app: ASGIApp, limits: Limits) -> ASGIApp:
    """Return `app` with each request's body read before it, see `read_body`."""

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = await read_body(Headers(scope=scope), receive, limits)
        await app(scope, receive, send)

    return whole


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> Receive:
    """Read a whole body.

    Args:
        headers: of the request.
        receive: hands out the body's parts.
        limits: how large it may be, and how long it may take.

    Returns:
        What hands out the body, then whatever comes, so that a client's leaving is still seen.

    Raises:
        Refusal: 413 if it is too large, 408 if too slow, 400 if the client left or declares no number.
    """
    max_bytes, timeout_s = limits.max_body_bytes, limits.body_timeout_s
    declared = headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit():
        raise Refusal(400, "Content-Length is not a number")
    if len(declared) > 18 or int(declared) > max_bytes:
        _refuse_size(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the client left before the body was complete")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    _refuse_size(max_bytes)
                if not message.get("more_body", False):
                    return _replayed(bytes(body), receive)
    except TimeoutError as error:
        raise Refusal(408, f"the body took longer than {timeout_s:g} s") from error


def _refuse_size(max_bytes: int) -> NoReturn:
    raise Refusal(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
