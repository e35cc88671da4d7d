"""The ASGI app that passes requests on to a server over HTTP, as they come.

What belongs to one connection is each side's own. A client that leaves is told to the server at once, by closing the
connection; an answer that the server cuts is cut for the client too.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import aiohttp
from multidict import CIMultiDict
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from services.access import RequestError

# Of one connection, not of a request (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
UNANSWERED = (aiohttp.ClientError, TimeoutError)

RawHeaders = Sequence[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client closed its connection."""


class RequestBody:
    """The body of one request, on its way to the server.

    Attributes:
        is_left: the client left.
    """

    def __init__(self, receive: Receive) -> None:
        self.is_left = False
        self._receive, self._come, self._whole = receive, bytearray(), asyncio.Event()
        self._read = False

    async def start(self, max_bytes: int) -> bytes | None:
        """Read up to the end and return it, or None if there is more; ClientLeft."""
        while not self._whole.is_set() and len(self._come) <= max_bytes:
            self._come += await self._next()
        return bytes(self._come) if self._whole.is_set() else None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield all of it, whatever was read before; ClientLeft."""
        if self._come:
            yield bytes(self._come)
        while not self._whole.is_set():
            yield await self._next()

    async def until_left(self) -> None:
        """Return when the client leaves after it sent all."""
        await self._whole.wait()
        while not self.is_left:
            await self._message()

    def again(self, whole: bytes | None = None) -> Receive:
        """Return what an app receives it by, whatever was read before; `whole` is in its place."""
        is_due = self._read

        async def receive() -> Message:
            nonlocal is_due
            if not is_due:
                return await self._message()
            is_due = False
            come = bytes(self._come) if whole is None else whole
            return {"type": "http.request", "body": come, "more_body": not self._whole.is_set()}

        return receive

    async def _next(self) -> bytes:
        message = await self._message()
        if self.is_left:
            raise ClientLeft
        self._read = True
        if not message.get("more_body", False):
            self._whole.set()
        part: bytes = message.get("body", b"")
        return part

    async def _message(self) -> Message:
        message = await self._receive()
        self.is_left |= message["type"] == "http.disconnect"
        return message


class ForwardingApp:
    """The ASGI app before one server; without an answer it answers 502."""

    def __init__(self, http: aiohttp.ClientSession, server: str) -> None:
        """Ask `server`, a URL without `/v1`, by `http`."""
        self._http, self._server = http, server
        self._is_away = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what cut an answer that had begun is raised."""
        body, answering = RequestBody(receive), asyncio.current_task()
        assert answering is not None, "an app is awaited by a task"

        async def leave() -> None:
            await body.until_left()
            answering.cancel()

        leaving = asyncio.create_task(leave())
        try:
            await self._pass(scope, body, send)
        except asyncio.CancelledError:
            if not body.is_left or answering.uncancel():
                raise
        except ClientLeft:
            pass
        finally:
            leaving.cancel()

    async def _pass(self, scope: Scope, body: RequestBody, send: Send) -> None:
        try:
            answer = await self._ask(scope, body)
        except UNANSWERED as error:
            if body.is_left:
                return
            if not self._is_away:  # once, and not for each request
                log.warning("%s does not answer (%s)", self._server, type(error).__name__)
            self._is_away = True
            message = f"the server behind this one does not answer ({type(error).__name__})"
            await RequestError(502, message, code="bad_gateway").response()(scope, body.again(), send)
            return
        self._is_away = False
        try:
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": backward(answer.raw_headers)}
            )
            while part := await answer.content.readany():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            answer.close()

    async def _ask(self, scope: Scope, body: RequestBody) -> aiohttp.ClientResponse:
        """Send a request on, and return the answer as soon as its headers are there."""
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(f"{self._server}{scope['raw_path'].decode('latin-1')}{query}", encoded=True)
        content: bytes | AsyncIterator[bytes] | None = await body.start(0)
        if not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
            content = None
        elif content is None:
            content = body.parts()
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in onward(scope["headers"])
        )
        return await self._http.request(scope["method"], url, headers=headers, data=content, allow_redirects=False)


def onward(headers: RawHeaders) -> RawHeaders:
    """Return what of a request's headers the server gets."""
    left_out = {*HOP_BY_HOP, b"host", *_named_by_connection(headers)}
    return [(name, value) for name, value in headers if name not in left_out and not name.startswith(b"x-redraft-")]


def backward(headers: RawHeaders) -> RawHeaders:
    """Return what of an answer's headers the client gets."""
    left_out = {*HOP_BY_HOP, *_named_by_connection(headers)}
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    said = [value for name, value in headers if name.lower() == b"connection"]
    return {part.strip().lower() for value in said for part in value.split(b",")}
