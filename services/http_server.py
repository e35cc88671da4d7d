"""The replica's HTTP server: it listens, reads the bodies of requests within bounds, and streams what is answered.

It listens on a socket that only the proxy before it can reach (services/reverse_proxy.py).

A body is read whole, within bytes and seconds, once somebody's key was checked, and held until its request was
answered. What all of them hold together is bounded, and what those of one key hold by half of that, so that no key can
keep another's out.

Of server-sent events a failure before the first is a status, one after it is an error frame. A stream always ends with
`[DONE]`, with its API's last event or with an error frame, so a client can tell a complete answer from a cut one. The
APIs differ in which event has the usage and how an error is told; whatever answers says an error as chats do, and it is
told here as the stream's API does.
"""

import asyncio
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.serving import Limits
from services.access import INTERNAL_ERROR, MESSAGES, RequestError
from services.failures import place_of
from services.questions import RESPONSES

BACKLOG = 1024
FULL = RequestError(503, "the requests that are being answered are too large together; ask again", code="overloaded")
TOO_LARGE = "the requests of this key that are being answered are too large together; ask again"
FULL_OF_KEY = RequestError(429, TOO_LARGE, code="rate_limit_exceeded")
DATA = "data: "
ERROR_START = 'data: {"error"'
DONE = "data: [DONE]\n\n"
# What the event with the usage has, and no text of an answer could: quotes and ends of lines are escaped in it.
CHAT_USAGE = '"choices":[]'
USAGE_EVENTS = {RESPONSES: "event: response.completed\n", MESSAGES: "event: message_delta\n"}

log = logging.getLogger(__name__)


def made_ready(app: ASGIApp, drain_s: float, **settings: Any) -> uvicorn.Server:
    """Return a server to start by its parts: its main loop would wake the process ten times a second."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="critical",  # what it tells of a failure quotes the request; whoever answers has told it
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(drain_s)),
        **settings,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


class Listener:
    """A server on a Unix socket; made by `start`, ended by `close`."""

    def __init__(self, server: uvicorn.Server, listened: socket.socket, path: Path) -> None:
        self._server, self._listened, self._path = server, listened, path
        self._inode = path.stat().st_ino

    @classmethod
    async def start(cls, app: ASGIApp, path: Path, drain_s: float) -> "Listener":
        """Listen at a path that only this user can reach, in the place of whoever listened there and ends by itself."""
        server = made_ready(app, drain_s, forwarded_allow_ips="*")  # of whoever reaches the socket
        listened = socket.socket(socket.AF_UNIX)
        made = path.with_name(f"{path.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        listened.bind(str(made))
        made.chmod(0o600)
        listened.listen(BACKLOG)
        await server.startup(sockets=[listened])
        made.rename(path)  # only now: whoever connects is answered
        return cls(server, listened, path)

    async def close(self) -> None:
        """Accept no more, and wait for what runs."""
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        await self._server.shutdown(sockets=[self._listened])


def listening(app: ASGIApp, path: Path, drain_s: float) -> ASGIApp:
    """Return `app`, which also listens at a path for as long as its lifespan lasts; see `Listener.start`."""
    listener: Listener | None = None

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        async def seen() -> Message:
            nonlocal listener
            message = await receive()
            if message["type"] == "lifespan.startup":
                listener = await Listener.start(app, path, drain_s)
            elif message["type"] == "lifespan.shutdown" and listener is not None:
                await listener.close()
            return message

        await app(scope, seen if scope["type"] == "lifespan" else receive, send)

    return both


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


async def opened(
    frames: AsyncGenerator[str, None],
    refuse: Callable[[dict[str, Any]], RequestError],
    usage: Callable[[], dict[str, Any] | None],
    closed: Callable[[], None],
    path: str = "",
) -> AsyncGenerator[str, None]:
    """Wait for the first frame, then return the stream.

    `refuse` turns the body of an error frame into what the client is told, which is raised if it is the first; `usage`
    is added to the event that carries the usage; `closed` is called once, when the stream ended or the client left.
    `path` is the API's.
    """
    try:
        first = await anext(frames)
    except BaseException:
        closed()
        raise
    if first.startswith(ERROR_START):
        closed()
        raise refuse(json.loads(first.removeprefix(DATA)))

    async def rest() -> AsyncGenerator[str, None]:
        num_sent, has_usage = 1, USAGE_EVENTS.get(path, CHAT_USAGE)
        try:
            yield first
            async for frame in frames:
                if frame.startswith(ERROR_START):
                    frame = _error(refuse(json.loads(frame.removeprefix(DATA))), path, num_sent)
                elif has_usage in frame:
                    frame = _with_usage(frame, usage())
                yield frame
                num_sent += 1
        except Exception as error:  # noqa: BLE001 - the status is long sent; the frame is the only way left to say it
            log.error("a stream failed: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
            yield _error(INTERNAL_ERROR, path, num_sent)
            if path not in USAGE_EVENTS:
                yield DONE
        finally:
            await frames.aclose()  # a client that left: the engine stops at once
            closed()

    return rest()


def _error(refusal: RequestError, path: str, number: int) -> str:
    """Return an error as an event of a path's stream; of a response's stream each event has a number."""
    if path == RESPONSES:
        told = {"code": refusal.code, "message": refusal.message, "param": refusal.param, "sequence_number": number}
        return f"event: error\n{event({'type': 'error', **told})}"
    return ("event: error\n" if path in USAGE_EVENTS else "") + event(refusal.body(path))


def _with_usage(frame: str, speculation: dict[str, Any] | None) -> str:
    name, _, data = frame.partition(DATA)
    body = json.loads(data)
    told = body.get("response", body)
    if speculation is not None and isinstance(told.get("usage"), dict):
        told["usage"]["redraft"] = speculation
    return name + event(body)


def event(body: dict[str, Any]) -> str:
    return f"{DATA}{json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"
