"""What stands in Serve's proxy: before a request takes one of the replica's slots, and after its replica is gone.

Left to itself, the proxy obeys a client's headers (a time limit that cuts streams, an id that it can't decode), keeps
reading a body however large, lets one that trickles in hold a slot, shows its own routes to anyone, answers overload as
plain text, tells the text of a crash, and lets the stream of a killed replica end without a word.
"""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.access import ANSWER_MARK, REQUEST_HEADERS, Refusal
from services.config import read_config
from services.failures import place_of

# The proxy is a process of Ray's: it learns by this variable which configuration it stands before.
CONFIG_VARIABLE = "SERVICE_CONFIG"
KEPT_HEADERS = tuple(name.lower().encode() for name in REQUEST_HEADERS)
SERVE_PATHS = "/-/"
NO_REPLICA = Refusal(503, "no replica is running; ask again in a few seconds", code="engine_unavailable")
OVERLOADED = Refusal(503, "too many requests are waiting; ask again in a few seconds", code="overloaded")
LOST = Refusal(503, "the replica that answered was lost; ask again", code="replica_lost")

log = logging.getLogger(__name__)


def middlewares() -> list[Middleware]:
    """Return what Serve puts around its proxy; called by it, see `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    limits = read_config(Path(os.environ[CONFIG_VARIABLE])).serve.limits
    return [Middleware(Edge, limits.max_body_bytes, limits.body_timeout_s)]


class Edge:
    """ASGI middleware: headers, size and time of a body, and an end for every answer."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        kept = [(name, value) for name, value in scope["headers"] if name.lower() in KEPT_HEADERS]
        inner = {**scope, "headers": kept}
        if scope["type"] != "http":
            await self._app(inner, receive, send)
            return
        try:
            if scope["path"].startswith(SERVE_PATHS):
                raise Refusal(404, "there is no such path")
            body = await read_body(Headers(scope=scope), receive, self._max_body_bytes, self._body_timeout_s)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(inner, _replayed(body, receive), answer.see)
        except Exception as error:  # noqa: BLE001 - the edge
            log.error("the proxy failed on a request: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
        if not answer.started:
            await answer.refusal.response()(scope, receive, send)
        elif answer.cut_stream:
            frames = f"data: {json.dumps(LOST.body(), separators=(',', ':'))}\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": frames.encode()})
        # Any other answer that was cut stays so: the server closes the connection on it, which its length gives away.


class _Answer:
    """Passes a replica's answer on, and keeps back what Serve says in its own words."""

    def __init__(self, send: Send) -> None:
        self.started = self._ended = self._streaming = False
        self.refusal = NO_REPLICA
        self._send = send

    @property
    def cut_stream(self) -> bool:
        return self._streaming and not self._ended

    async def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self.started = ANSWER_MARK.decode() in headers
            self._streaming = headers.get("content-type", "").startswith("text/event-stream")
            if message["status"] in (429, 503):
                self.refusal = OVERLOADED
        if self.started:
            self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)


async def read_body(headers: Headers, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Read a whole body.

    Args:
        headers: of the request.
        receive: hands out the body's parts.
        max_bytes: largest body that is taken.
        timeout_s: seconds until the last part must be there.

    Raises:
        Refusal: 413 if it is too large, 408 if too slow, 400 if the client left or declares no number.
    """
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
                    return bytes(body)
    except TimeoutError as error:
        raise Refusal(408, f"the body took longer than {timeout_s:g} s") from error


def _refuse_size(max_bytes: int) -> NoReturn:
    raise Refusal(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Hand out the body that was read, then whatever comes, so that a client's leaving is still seen."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
