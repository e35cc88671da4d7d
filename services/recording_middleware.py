"""The ASGI middleware that gives consented requests and what a server answers to the recorder.

The server is the app behind it: one that passes requests on (services/forwarding.py), or vLLM's own, which it is loaded
into. Nothing that it fails at stops a request: what can't be logged passes and is counted with its reason, and without
consent no byte is changed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.serving import RECORDER_HEALTH
from services.access import Keys, RequestError
from services.consented import MAX_BODY_BYTES, Consented, Unrecorded, may_record, read_consented
from services.forwarding import UNANSWERED, ClientLeft, RawHeaders, RequestBody
from services.frames import Added, AnswerReader, StreamReader, without_ids
from services.questions import Domains
from services.recorder import Recorder

STATUS_PATH = "/redraft/recorder"
POLL_S, ASK_S = 1.0, 5.0
MAX_DUE = 10_000  # answers that wait until the draft's version was asked again
EVENTS = "text/event-stream"
FRAMING = (b"content-length", b"transfer-encoding")
REFUSED = (400, 422)  # as a server answers that does not take what we add


class DraftVersions:
    """Which draft the server has, asked every second.

    Attributes:
        current: its number in the registry, as text; "" where it is not known.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.current = ""
        self._app, self._token = app, token
        self._due: list[tuple[str, Callable[[str], None]]] = []

    def after(self, began: str, settle: Callable[[str], None]) -> None:
        """Call `settle` with the version that a request, which ends now, was served by from the beginning, or ""."""
        if began and len(self._due) < MAX_DUE:
            self._due.append((began, settle))
        else:
            settle("")

    async def run(self) -> None:
        """Ask for as long as the process runs."""
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://server") as http:
            while self._token:
                due, self._due = self._due, []
                found = await self._ask(http)
                for began, settle in due:
                    settle(began if began == found else "")
                self.current = found
                await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Settle what is due without asking."""
        for _, settle in self._due:
            settle("")

    async def _ask(self, http: httpx.AsyncClient) -> str:
        try:
            async with asyncio.timeout(ASK_S):
                answer = await http.get("/redraft/draft", headers={"Authorization": f"Bearer {self._token}"})
            told = answer.json() if answer.status_code == HTTPStatus.OK else {}
            version = str(told.get("version", "")) if told.get("state") != "unknown" else ""
        except (*UNANSWERED, ValueError, AttributeError):
            return ""
        return version if version.isascii() and version.isdigit() else ""


class RewrittenAnswer:
    """An answer on its way to the client, from which what only we asked for is taken out.

    Attributes:
        status: its status, 0 before it began; one of REFUSED is kept from the client.
        reader: reads it, None where it is an error or encoded.
        is_complete: nothing of it is to come.
    """

    def __init__(self, added: Added, send: Send) -> None:
        self.status, self.is_complete = 0, False
        self.reader: AnswerReader | None = None
        self._added, self._client = added, send
        self._start: Message = {}
        self._whole = bytearray()

    async def send(self, message: Message) -> None:
        """Take the app's next message."""
        if message["type"] == "http.response.start":
            await self._begin(message)
            return
        self.is_complete = not message.get("more_body", False)
        if self.status in REFUSED:
            return
        part = message.get("body", b"")
        if isinstance(self.reader, StreamReader):
            part = self.reader.feed(part) + (self.reader.rest() if self.is_complete else b"")
            if part or self.is_complete:
                await self._client({**message, "body": part})
        elif self.reader is None:
            await self._client(message)
        else:
            self._whole += part
            if self.is_complete:
                body = self.reader.whole(bytes(self._whole))
                headers = [*_without_length(self._start), (b"content-length", str(len(body)).encode())]
                await self._client({**self._start, "headers": headers})
                await self._client({**message, "body": body})

    async def cut(self) -> None:
        """Give the client what came of an answer that does not go on; it ends as it came, not complete."""
        if self.reader is None:
            return
        self.reader.fault = "an answer that was cut"
        if isinstance(self.reader, StreamReader):
            rest = self.reader.rest()
        else:
            await self._client(self._start)
            rest = without_ids(bytes(self._whole)) if self._added.ids else bytes(self._whole)
        await self._client({"type": "http.response.body", "body": rest, "more_body": True})

    async def _begin(self, message: Message) -> None:
        self.status, self._start = message["status"], message
        if self.status in REFUSED:
            return
        headers = Headers(raw=[(name.lower(), value) for name, value in message["headers"]])
        if self.status != HTTPStatus.OK or "content-encoding" in headers:
            await self._client(message)
        elif headers.get("content-type", "").partition(";")[0].strip() == EVENTS:
            self.reader = StreamReader(self._added)
            await self._client({**message, "headers": _without_length(message)})
        else:
            self.reader = AnswerReader(self._added)


class RecordingMiddleware:
    """The ASGI middleware.

    Attributes:
        recorded: answers that were given to the recorder.
        passed: reason to number of those that were not.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Sequence[str],
        recorder: Recorder,
        versions: DraftVersions,
        keys: Keys,
        secret: bytes,
        defaults: dict[str, Any],
        knows: Callable[[int], bool],
    ) -> None:
        """Say what is before what.

        Args:
            app: the server.
            models: names by which it knows the target; requests for others pass unlogged.
            recorder: gets what is answered.
            versions: of the server's draft.
            keys: those of the home, whose policies hold for requests with them.
            secret: of the home, under which groups are hashed.
            defaults: sampling of requests that don't say how.
            knows: whether the target has a token id.
        """
        self.recorded, self.passed = 0, Counter[str]()
        self._app, self._models = app, models
        self._recorder, self._versions, self._keys = recorder, versions, keys
        self._secret, self._defaults, self._domains = secret, defaults, Domains()
        self._knows, self._takes_more = knows, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == RECORDER_HEALTH:
            await Response(status_code=HTTPStatus.NO_CONTENT)(scope, receive, send)
        elif scope["path"] == STATUS_PATH:
            try:
                self._keys.identify(Headers(scope=scope), STATUS_PATH)
            except RequestError as refusal:
                await refusal.response()(scope, receive, send)
            else:
                await JSONResponse(self.status())(scope, receive, send)
        else:
            body = RequestBody(receive)
            try:
                wanted = await self._consented(scope, body)
            except ClientLeft:
                return
            if wanted is None:
                await self._app(scope, body.again(), send)
            else:
                await self._record(scope, body, wanted, send)

    def status(self) -> dict[str, Any]:
        """Return what was recorded, and what was not for which reason."""
        counts = self._recorder.counts().model_dump(exclude={"unlogged"})
        passed = dict(sorted(self.passed.items()))
        return {"recorded": self.recorded, "passed": passed, "draft": self._versions.current, "log": counts}

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

    async def _record(self, scope: Scope, body: RequestBody, wanted: Consented, send: Send) -> None:
        began, answer = self._versions.current, RewrittenAnswer(wanted.added, send)
        asked = {**scope, "headers": _asking(scope["headers"], len(wanted.body))}
        try:
            await self._app(asked, body.again(wanted.body), answer.send)
        finally:
            if not (answer.is_complete or body.is_left):
                await answer.cut()
            if answer.reader is not None:
                self._keep(wanted, answer.reader, began)
            elif answer.status not in (0, *REFUSED):
                is_error = answer.status >= HTTPStatus.BAD_REQUEST
                self.passed["an error" if is_error else "an answer that can't be read"] += 1
        if answer.status in REFUSED and not body.is_left:  # it may be what was added that it does not take
            await self._app(scope, body.again(), self._seen(send))

    def _seen(self, send: Send) -> Send:
        """Return how an answer is sent to a request that was refused before."""

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_error = message["status"] >= HTTPStatus.BAD_REQUEST
                self._takes_more &= is_error
                self.passed["an error" if is_error else "a server that refuses return_token_ids"] += 1
            await send(message)

        return seen

    def _keep(self, wanted: Consented, reader: AnswerReader, began: str) -> None:
        if reason := reader.fault or ("" if reader.has_ids else "an answer without token ids"):
            self.passed[reason] += 1
            return

        def settle(version: str) -> None:
            sampling = {**self._defaults, **wanted.sampling}
            try:
                completion = reader.completion(wanted.origin.request_id, version, wanted.structured)
            except ValueError:
                self.passed["an answer that can't be read"] += 1
                return
            if not self._knows(max(*completion.prompt_ids, *completion.token_ids)):
                self.passed["ids of another target"] += 1
                return
            self.recorded += 1
            self._recorder.expect(wanted.origin)
            self._recorder.finished(completion, SimpleNamespace(n=1, **sampling))
            self._recorder.forget(wanted.origin.request_id)

        self._versions.after(began, settle)


def _asking(headers: RawHeaders, length: int) -> RawHeaders:
    """Return a request's headers with the length of another body, and for an answer that can be read."""
    kept = [(name, value) for name, value in headers if name not in (*FRAMING, b"accept-encoding")]
    return [*kept, (b"content-length", str(length).encode()), (b"accept-encoding", b"identity")]


def _without_length(start: Message) -> RawHeaders:
    return [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
