"""The ASGI app that passes requests on to somebody else's server, and gives consented ones to the recorder.

Nothing that it fails at stops a request: what can't be logged passes and is counted with its reason, and without
consent no byte is changed. A client that leaves is told to the server at once, by closing the connection.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from services.access import Keys, RequestError
from services.consented import MAX_BODY_BYTES, Consented, Unrecorded, may_record, read_consented
from services.frames import AnswerReader, StreamReader
from services.questions import Domains
from services.recorder import Recorder

STATUS_PATH = "/redraft/recorder"
POLL_S, ASK_S = 1.0, 5.0
MAX_DUE = 10_000  # answers that wait until the draft's version was asked again
# Of one connection, not of a request (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
EVENTS = "text/event-stream"
REFUSED = (400, 422)  # as a server answers that does not take what we add
UNANSWERED = (aiohttp.ClientError, TimeoutError)

RawHeaders = Sequence[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client closed its connection."""


class RequestBody:
    """The body of one request, on its way to the server.

    Attributes:
        is_cut: the client left before it sent all.
    """

    def __init__(self, receive: Receive) -> None:
        self.is_cut = False
        self._receive, self._come, self._whole = receive, bytearray(), asyncio.Event()

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
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_cut = True
            raise ClientLeft
        if not message.get("more_body", False):
            self._whole.set()
        part: bytes = message.get("body", b"")
        return part


class DraftVersions:
    """Which draft the server has, asked every second.

    Attributes:
        current: its number in the registry, as text; "" where it is not known.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.current = ""
        self._http, self._url, self._token = http, url, token
        self._due: list[tuple[str, Callable[[str], None]]] = []

    def after(self, began: str, settle: Callable[[str], None]) -> None:
        """Call `settle` with the version that a request, which ends now, was served by from the beginning, or ""."""
        if began and len(self._due) < MAX_DUE:
            self._due.append((began, settle))
        else:
            settle("")

    async def run(self) -> None:
        """Ask for as long as the process runs."""
        while self._token:
            due, self._due = self._due, []
            found = await self._ask()
            for began, settle in due:
                settle(began if began == found else "")
            self.current = found
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Settle what is due without asking."""
        for _, settle in self._due:
            settle("")

    async def _ask(self) -> str:
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(ASK_S)
        try:
            async with self._http.get(f"{self._url}/redraft/draft", headers=headers, timeout=timeout) as answer:
                told = await answer.json(content_type=None) if answer.status == HTTPStatus.OK else {}
            version = str(told.get("version", "")) if told.get("state") != "unknown" else ""
        except (*UNANSWERED, ValueError, AttributeError):
            return ""
        return version if version.isascii() and version.isdigit() else ""


class RecordingProxy:
    """The ASGI app.

    Attributes:
        recorded: answers that were given to the recorder.
        passed: reason to number of those that were not.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        server: str,
        models: Sequence[str],
        recorder: Recorder,
        versions: DraftVersions,
        keys: Keys,
        secret: bytes,
        defaults: dict[str, Any],
    ) -> None:
        """Say what is before what.

        Args:
            http: what the server is asked with.
            server: its URL, without `/v1`.
            models: names by which it knows the target; requests for others pass unlogged.
            recorder: gets what is answered.
            versions: of the server's draft.
            keys: those of the home, whose policies hold for requests with them.
            secret: of the home, under which groups are hashed.
            defaults: sampling of requests that don't say how.
        """
        self.recorded, self.passed = 0, Counter[str]()
        self._http, self._server, self._models = http, server, models
        self._recorder, self._versions, self._keys = recorder, versions, keys
        self._secret, self._defaults, self._domains = secret, defaults, Domains()
        self._takes_more = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        started, body = False, RequestBody(receive)

        async def seen(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["path"] == STATUS_PATH:
                self._keys.identify(Headers(scope=scope), STATUS_PATH)
                await JSONResponse(self.status())(scope, receive, seen)
            else:
                await self._answer(scope, body, seen)
        except ClientLeft:
            pass
        except RequestError as refusal:
            await refusal.response()(scope, receive, seen)
        except UNANSWERED as error:
            if body.is_cut:
                return
            log.warning("%s %s: %s", scope["method"], self._server, type(error).__name__)
            if not started:
                message = f"the server behind this one does not answer ({type(error).__name__})"
                await RequestError(502, message, code="bad_gateway").response()(scope, receive, seen)
            # Otherwise nothing more is sent, and uvicorn cuts the connection: the answer must not look whole.

    def status(self) -> dict[str, Any]:
        """Return what was recorded, and what was not for which reason."""
        counts = self._recorder.counts().model_dump(exclude={"unlogged"})
        passed = dict(sorted(self.passed.items()))
        return {"recorded": self.recorded, "passed": passed, "draft": self._versions.current, "log": counts}

    async def _answer(self, scope: Scope, body: RequestBody, send: Send) -> None:
        """Pass a request on until it is answered or the client leaves, which the server is then told at once."""
        wanted = await self._consented(scope, body)
        answered = asyncio.create_task(self._pass(scope, body, wanted, send))
        left = asyncio.create_task(body.until_left())
        try:
            await asyncio.wait({answered, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = answered.done()
            for task in (answered, left):
                task.cancel()
            ended, _ = await asyncio.gather(answered, left, return_exceptions=True)
        if done and isinstance(ended, Exception):
            raise ended

    async def _consented(self, scope: Scope, body: RequestBody) -> Consented | None:
        """Return what is known of a request that may be recorded; None, and count why, if it may not."""
        headers = Headers(scope=scope)
        try:
            may_record(scope["method"], scope["path"], headers)
            if not self._takes_more:
                raise Unrecorded("a server that refuses return_token_ids")
            if (whole := await body.start(MAX_BODY_BYTES)) is None:
                raise Unrecorded("a body too large")
            return read_consented(headers, whole, self._models, self._keys, self._secret, self._domains)
        except Unrecorded as unrecorded:
            if reason := str(unrecorded):
                self.passed[reason] += 1
            return None

    async def _pass(self, scope: Scope, body: RequestBody, wanted: Consented | None, send: Send) -> None:
        began = self._versions.current
        answer = await self._ask(scope, body, wanted)
        if wanted is not None and answer.status in REFUSED:  # it may be what was added that it does not take
            answer.close()
            answer = await self._ask(scope, body, None)
            self._takes_more &= not answer.ok
        reader: AnswerReader | None = None
        try:
            kind = answer.headers.get("content-type", "").partition(";")[0].strip()
            if wanted is None:
                await _send_raw(answer, send)
            elif answer.status != HTTPStatus.OK or "content-encoding" in answer.headers:
                self.passed["an answer that can't be read" if answer.ok else "an error"] += 1
                await _send_raw(answer, send)
            elif kind == EVENTS:
                reader = stream = StreamReader(wanted.added)
                await _send_stream(answer, stream, send)
            else:
                reader = AnswerReader(wanted.added)
                await _send_whole(answer, reader, send)
        finally:
            if wanted is not None and reader is not None:
                self._keep(wanted, reader, began)
            answer.close()

    async def _ask(self, scope: Scope, body: RequestBody, wanted: Consented | None) -> aiohttp.ClientResponse:
        """Send a request on, and return the answer as soon as its headers are there."""
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(f"{self._server}{scope['raw_path'].decode('latin-1')}{query}", encoded=True)
        content: bytes | AsyncIterator[bytes] | None = None if wanted is None else wanted.body
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
            content = content or body.parts()
        else:
            await body.start(0)
        sent = onward(scope["headers"], wanted is not None)
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in sent)
        return await self._http.request(scope["method"], url, headers=headers, data=content, allow_redirects=False)

    def _keep(self, wanted: Consented, reader: AnswerReader, began: str) -> None:
        if reader.fault or not reader.has_ids:
            self.passed[reader.fault or "an answer without token ids"] += 1
            return

        def settle(version: str) -> None:
            sampling = {**self._defaults, **wanted.sampling}
            try:
                completion = reader.completion(wanted.origin.request_id, version, wanted.structured)
            except ValueError:
                self.passed["an answer that can't be read"] += 1
                return
            self.recorded += 1
            self._recorder.expect(wanted.origin)
            self._recorder.finished(completion, SimpleNamespace(n=1, **sampling))
            self._recorder.forget(wanted.origin.request_id)

        self._versions.after(began, settle)


def onward(headers: RawHeaders, rewritten: bool) -> RawHeaders:
    """Return what of a request's headers the server gets; of a rewritten one its length and its encodings change."""
    left_out = {*HOP_BY_HOP, b"host", *_named_by_connection(headers)}
    left_out |= {b"content-length", b"accept-encoding"} if rewritten else set()
    kept = [(name, value) for name, value in headers if name not in left_out and not name.startswith(b"x-redraft-")]
    return [*kept, (b"accept-encoding", b"identity")] if rewritten else kept


def backward(headers: RawHeaders, rewritten: bool = False) -> RawHeaders:
    """Return what of an answer's headers the client gets."""
    left_out = {*HOP_BY_HOP, *_named_by_connection(headers), *([b"content-length"] if rewritten else [])}
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    said = [value for name, value in headers if name.lower() == b"connection"]
    return {part.strip().lower() for value in said for part in value.split(b",")}


async def _send_raw(answer: aiohttp.ClientResponse, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": backward(answer.raw_headers)})
    while part := await answer.content.readany():
        await _send_part(send, part)
    await _send_part(send, b"", more=False)


async def _send_stream(answer: aiohttp.ClientResponse, reader: StreamReader, send: Send) -> None:
    headers = backward(answer.raw_headers, rewritten=True)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        while part := await answer.content.readany():
            if passed := reader.feed(part):
                await _send_part(send, passed)
    except UNANSWERED:
        reader.fault = "an answer that was cut"
        await _send_part(send, reader.rest())
        raise
    await _send_part(send, reader.rest(), more=False)


async def _send_whole(answer: aiohttp.ClientResponse, reader: AnswerReader, send: Send) -> None:
    body = reader.whole(await answer.read())
    headers = [*backward(answer.raw_headers, rewritten=True), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await _send_part(send, body, more=False)


async def _send_part(send: Send, part: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})
