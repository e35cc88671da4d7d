"""The ASGI middleware that gives consented requests and what a server answers to the recorder.

The server is the app behind it: one that passes requests on (services/record.py), or vLLM's own, which it is loaded
into. Nothing that it fails at stops a request: what can't be logged passes and is counted with its reason, and without
consent no byte is changed.

Nothing is learnt from a request whose answer is none of the target's own over what the prompt says: of several choices
or prompts, with pictures, with its prompt repeated (`echo`, which vLLM writes otherwise once token ids are asked for),
or with its thoughts hidden.
"""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.home import RECORDER_HEALTH
from models.engines.vllm.redraft_vllm.served import ASKED, TOLD, read_told
from services.access import Keys, RequestError
from services.frames import Added, AnswerReader, StreamReader, without_ids
from services.questions import Domains, Origin, describe_origin, parse_body
from services.recorder import SAMPLING, Recorder

STATUS_PATH = "/redraft/recorder"
EVENTS = "text/event-stream"
FRAMING = (b"content-length", b"transfer-encoding")
REFUSED = (400, 422)  # as a server answers that does not take what we add
PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 32 << 20
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

RawHeaders = Sequence[tuple[bytes, bytes]]


class Unrecorded(Exception):
    """Why a request passes unlogged; "" for one that is no question to a model."""


class Consented(NamedTuple):
    """A request that is recorded: who asked, how, and the body that the server gets."""

    origin: Origin
    sampling: dict[str, Any]
    structured: bool
    added: Added
    body: bytes


class ClientLeft(Exception):
    """The client closed its connection."""


class RequestBody:
    """The body of one request, on its way to the server; `is_left` once the client left."""

    def __init__(self, receive: Receive) -> None:
        self.is_left = self._read = False
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
        return bytes(message.get("body", b""))

    async def _message(self) -> Message:
        message = await self._receive()
        self.is_left |= message["type"] == "http.disconnect"
        return message


class RewrittenAnswer:
    """An answer on its way to the client, from which what only we asked for is taken out; REFUSED ones are kept."""

    def __init__(self, added: Added, send: Send) -> None:
        self.status, self.is_complete = 0, False
        self.reader: AnswerReader | None = None  # of an error or what is encoded there is none
        self._added, self._client, self._whole = added, send, bytearray()
        self._start: Message = {}

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
                kept = _without(self._start["headers"], b"content-length")
                headers = [*kept, (b"content-length", str(len(body)).encode())]
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
        headers = Headers(raw=[(name.lower(), value) for name, value in message["headers"]])
        message = {**message, "headers": _without(message["headers"], TOLD)}
        self.status, self._start = message["status"], message
        if self.status in REFUSED:
            return
        if self.status != HTTPStatus.OK or "content-encoding" in headers:
            await self._client(message)
        elif headers.get("content-type", "").partition(";")[0].strip() == EVENTS:
            self.reader = StreamReader(self._added)
            await self._client({**message, "headers": _without(message["headers"], b"content-length")})
        else:
            self.reader = AnswerReader(self._added)
            self.reader.served_by = read_told(headers.get(TOLD.decode(), "").encode())


@dataclass(eq=False)
class RecordingMiddleware:
    """The ASGI middleware before a server, `app`."""

    app: ASGIApp
    models: Sequence[str]  # names by which the server knows the target; requests for others pass unlogged
    recorder: Recorder
    proof: bytes  # that the plugin's token is known, b"" if it is not: then no server tells who answered
    keys: Keys  # of the home: their policies hold for requests with them
    secret: bytes  # of the home: groups are hashed under it
    defaults: dict[str, Any]  # sampling of requests that don't say how
    knows: Callable[[int], bool]  # whether the target has a token id
    recorded: int = 0  # answers that were given to the recorder
    unnamed: int = 0  # those of them that did not tell which server and draft gave all of them
    passed: Counter[str] = field(default_factory=Counter)  # those that were not, by reason
    _domains: Domains = field(default_factory=Domains)
    _takes_more: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] == RECORDER_HEALTH:
            await Response(status_code=HTTPStatus.NO_CONTENT)(scope, receive, send)
        elif scope["path"] == STATUS_PATH:
            try:
                self.keys.identify(Headers(scope=scope), STATUS_PATH)
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
                await self.app(scope, body.again(), send)
            else:
                await self._record(scope, body, wanted, send)

    def status(self) -> dict[str, Any]:
        """Return what was recorded, and what was not for which reason."""
        counts = self.recorder.counts().model_dump(exclude={"unlogged"})
        passed = dict(sorted(self.passed.items()))
        return {"recorded": self.recorded, "unnamed": self.unnamed, "passed": passed, "log": counts}

    async def _consented(self, scope: Scope, body: RequestBody) -> Consented | None:
        """Return what is known of a request that may be recorded; None, and count why, if it may not."""
        headers = Headers(scope=scope)
        try:
            if scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
                raise Unrecorded("")
            if scope["path"] not in PATHS:
                raise Unrecorded("another path")
            if headers.get("x-redraft-log", "full") != "full":
                raise Unrecorded("no consent")
            if not self._takes_more:
                raise Unrecorded("a server that refuses return_token_ids")
            if (whole := await body.start(MAX_BODY_BYTES)) is None:
                raise Unrecorded("a body too large")
            return self._read(headers, whole)
        except Unrecorded as unrecorded:
            if reason := str(unrecorded):
                self.passed[reason] += 1
            return None

    def _read(self, headers: Headers, raw: bytes) -> Consented:
        """Return what is known of a request; Unrecorded if it may not be recorded, or can't be read."""
        caller = self.keys.caller(headers)
        silent = "x-redraft-log" not in headers and (caller is None or caller.log != "full")
        if silent and b'"store"' not in raw:
            raise Unrecorded("no consent")
        try:
            body = parse_body(headers.get("content-type", ""), raw)
            origin = describe_origin(uuid.uuid4().hex, headers, body, caller, self.secret)
        except RequestError as error:
            raise Unrecorded("a request that can't be read") from error
        if body.get("model") not in self.models:
            raise Unrecorded("another model")
        if origin.consent != "full":
            raise Unrecorded("no consent")
        if reason := _unlearnable(body):
            raise Unrecorded(reason)
        origin = origin._replace(domain=self._domains.admit(origin.key, origin.domain))
        sampling = {name: value for name in SAMPLING if isinstance(value := body.get(name), int | float)}
        if isinstance(most := body.get("max_completion_tokens"), int):
            sampling["max_tokens"] = most
        form = body.get("response_format")
        structured = isinstance(form, dict) and form.get("type", "text") != "text"
        structured |= body.get("tool_choice") not in (None, "none", "auto") or any(map(body.get, GRAMMARS))
        return Consented(origin, sampling, structured, *_asking_more(body, raw))

    async def _record(self, scope: Scope, body: RequestBody, wanted: Consented, send: Send) -> None:
        answer = RewrittenAnswer(wanted.added, send)
        asked = {**scope, "headers": self._asking(scope["headers"], len(wanted.body))}
        try:
            await self.app(asked, body.again(wanted.body), answer.send)
        finally:
            if not (answer.is_complete or body.is_left):
                await answer.cut()
            if answer.reader is not None:
                self._keep(wanted, answer.reader)
            elif answer.status not in (0, *REFUSED):
                is_error = answer.status >= HTTPStatus.BAD_REQUEST
                self.passed["an error" if is_error else "an answer that can't be read"] += 1
        if answer.status in REFUSED and not body.is_left:  # it may be what was added that it does not take
            await self.app(scope, body.again(), self._seen(send))

    def _seen(self, send: Send) -> Send:
        """Return how an answer is sent to a request that was refused before."""

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                is_error = message["status"] >= HTTPStatus.BAD_REQUEST
                self._takes_more &= is_error
                self.passed["an error" if is_error else "a server that refuses return_token_ids"] += 1
            await send(message)

        return seen

    def _keep(self, wanted: Consented, reader: AnswerReader) -> None:
        if reason := reader.fault or ("" if reader.has_ids else "an answer without token ids"):
            self.passed[reason] += 1
            return
        try:
            completion = reader.completion(wanted.origin.request_id, wanted.structured)
        except ValueError:
            self.passed["an answer that can't be read"] += 1
            return
        if not self.knows(max(*completion.prompt_ids, *completion.token_ids)):
            self.passed["ids of another target"] += 1
            return
        self.recorded += 1
        self.unnamed += not (completion.server and completion.draft_version)
        self.recorder.expect(wanted.origin)
        self.recorder.finished(completion, SimpleNamespace(n=1, **{**self.defaults, **wanted.sampling}))
        self.recorder.forget(wanted.origin.request_id)

    def _asking(self, headers: RawHeaders, length: int) -> RawHeaders:
        """Return a request's headers with the length of another body, for an answer that can be read and is told of."""
        kept = _without(headers, *FRAMING, b"accept-encoding", ASKED)
        more = [(b"content-length", str(length).encode()), (b"accept-encoding", b"identity")]
        return [*kept, *more, *([(ASKED, self.proof)] if self.proof else [])]


def _without(headers: RawHeaders, *names: bytes) -> RawHeaders:
    return [(name, value) for name, value in headers if name.lower() not in names]


def _unlearnable(body: Mapping[str, Any]) -> str:
    """Return why the answer says nothing of how the target answers the prompt, "" if it does."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    parts = [
        part
        for message in body.get("messages") or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    reasons = {
        "several choices": any(body.get(name) not in (None, 1) for name in ("n", "best_of"))
        or bool(body.get("use_beam_search")),
        "several prompts": several and len(prompt or ()) != 1,
        "a repeated prompt": bool(body.get("echo")),
        "hidden thoughts": body.get("include_reasoning") is False,
        "other than text": bool(body.get("prompt_embeds"))
        or any(isinstance(part, dict) and part.get("type") not in TEXT_PARTS for part in parts),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _asking_more(body: dict[str, Any], raw: bytes) -> tuple[Added, bytes]:
    """Return what is asked for beyond the client's wish, and the body that does, behind what the client wrote."""
    options = body.get("stream_options")
    streams = body.get("stream") is True and isinstance(options, dict | None)
    wants_usage = bool((options or {}).get("include_usage")) if streams else True
    added = Added(ids=body.get("return_token_ids") is not True, usage=not wants_usage)
    more: dict[str, Any] = {"return_token_ids": True} if added.ids else {}
    if added.usage:  # without it this one has no effect
        kept = {name: value for name, value in (options or {}).items() if name != "continuous_usage_stats"}
        more["stream_options"] = {**kept, "include_usage": True}
    if not more:
        return added, raw
    if more.keys() & body.keys():
        return added, json.dumps({**body, **more}, ensure_ascii=False).encode()
    written = json.dumps(more, separators=(",", ":"))[1:].encode()
    return added, raw.rstrip()[:-1] + b"," + written
