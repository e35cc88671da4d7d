"""What stands in Serve's proxy, where HAProxy does not: before a request takes a slot of the replica, and after it.

Left to itself, the proxy obeys a client's headers (a time limit that cuts streams, an id that it can't decode), reads a
body however large or slow, shows its own routes to anyone, answers overload as plain text, tells the text of a crash
and lets the stream of a killed replica end without a word. Nothing bounds connections, nor how long their headers take.
"""

import json
import logging
import os
from itertools import chain
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.keys import is_loopback
from models.serving import Limits
from services.access import ANSWER_MARK, OPEN_PATHS, Keys, RequestError, known
from services.config import ServiceConfig, read_as
from services.failures import place_of
from services.fair_queue import OVERLOADED
from services.http_server import read_body

# The proxy is a process of Ray's: it learns by this variable which configuration it stands before.
CONFIG_VARIABLE = "SERVICE_CONFIG"
SERVE_PATHS = "/-/"
# Of a request, its first line left out.
HEADER_BYTES, HEADER_LINES = 15 << 10, 64
NO_REPLICA = RequestError(503, "no replica is running; ask again in a few seconds", code="engine_unavailable")
SIZES = f"at most {HEADER_LINES} headers are taken, of {HEADER_BYTES} bytes"
TOO_LARGE = RequestError(400, SIZES, code="headers_too_large")
LOST = RequestError(503, "the replica that answered was lost; ask again", code="replica_lost")
# One end for the streams of all APIs: OpenAI's clients look for `error`, Anthropic's for the event's name.
LOST_BODY = json.dumps({"type": "error", **LOST.body()}, separators=(",", ":"))
LOST_FRAMES = f"event: error\ndata: {LOST_BODY}\n\ndata: [DONE]\n\n".encode()

log = logging.getLogger(__name__)


def middlewares() -> list[Middleware]:
    """Return what Serve puts around its proxy; called by it, see `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    config = read_as(ServiceConfig, Path(os.environ[CONFIG_VARIABLE]))
    return [Middleware(RequestMiddleware, Keys(config.keys, is_loopback(config.settings.host)), config.serve.limits)]


class RequestMiddleware:
    """ASGI middleware: key and headers, then size and time of a body, and an end for every answer."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**scope, "headers": known(scope["headers"])}
        if scope["type"] != "http":
            await self._app(inner, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            if len(headers.raw) > HEADER_LINES or sum(map(len, chain(*headers.raw))) > HEADER_BYTES:
                raise TOO_LARGE
            if scope["path"] not in OPEN_PATHS:
                self._keys.identify(headers, scope["path"])
            if scope["path"].startswith(SERVE_PATHS):
                raise RequestError(404, "there is no such path")
            body = await read_body(headers, receive, self._limits)
        except RequestError as refusal:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(inner, body, answer.see)
        except Exception as error:  # noqa: BLE001 - the edge
            log.error("the proxy failed on a request: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
        if not answer.started:
            await answer.refusal.response(scope["path"])(scope, receive, send)
        elif answer.is_stream and not answer.ended:
            await send({"type": "http.response.body", "body": LOST_FRAMES})
        # Any other answer that was cut stays so: the server closes the connection on it, which its length gives away.


class _Answer:
    """Passes a replica's answer on, and keeps back what Serve says in its own words."""

    def __init__(self, send: Send) -> None:
        self.started = self.ended = self.is_stream = False
        self.refusal = NO_REPLICA
        self._send = send

    async def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self.started = ANSWER_MARK.decode() in headers
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if message["status"] in (429, 503):
                self.refusal = OVERLOADED
        if self.started:
            self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)
