"""Which server and draft gave an answer, told with the answer to a recorder that knows the plugin's token.

A recorder may stand before a router to several servers, and a draft may be replaced while an answer is on its way. So
the server tells at the end of the answer what served all of it: in a header of a whole one, in a comment before the
last event of a stream, which no client reads. Who does not show that the token is known gets the answer as it is.
"""

import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

TOKEN = "REDRAFT_ATTACH_TOKEN"  # noqa: S105 - the variable's name
ASKED, TOLD = b"redraft-served", b"redraft-served-by"  # headers of a request, and of a whole answer
COMMENT, LAST = b": redraft ", b"data: [DONE]"
SERVER = re.compile(r"[\x21-\x7e]{1,128}")

App = Callable[[Any, Any, Any], Awaitable[None]]


class ServedBy(NamedTuple):
    """The server's host name and port, and its draft's number in the registry; "" for what is not known."""

    server: str = ""
    draft_version: str = ""


def proof(token: str) -> bytes:
    """Return what shows that a token is known and does not tell it."""
    return hmac.new(token.encode(), ASKED, "sha256").hexdigest().encode()


def read_told(told: bytes) -> ServedBy:
    """Return what a server told of an answer; nothing of what can't be read."""
    try:
        server, version = json.loads(told)
        is_named, is_number = SERVER.fullmatch(server), version.isascii() and version.isdigit()
    except (AttributeError, TypeError, ValueError):
        return ServedBy()
    return ServedBy(server if is_named else "", version if is_named and is_number else "")


class TellingMiddleware:
    """The ASGI middleware that tells it, by the server's `Swapper`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        swapper = getattr(scope["app"].state, "redraft_swapper", None) if scope["type"] == "http" else None
        if swapper is None or not _is_asked(scope["headers"]):
            await self._app(scope, receive, send)
            return
        began, streams = swapper.served(), False

        def told() -> bytes:
            version = began[1] if began is not None and began == swapper.served() else ""
            return json.dumps([swapper.server, version]).encode()

        async def tell(message: Any) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
                if not streams:
                    message = {**message, "headers": [*message["headers"], (TOLD, told())]}
            elif streams and message.get("body", b"").startswith(LAST):
                message = {**message, "body": COMMENT + told() + b"\n\n" + message["body"]}
            await send(message)

        await self._app(scope, receive, tell)


def _is_asked(headers: Any) -> bool:
    token = os.environ.get(TOKEN, "")
    said = [value for name, value in headers if name == ASKED]
    return bool(token and said) and hmac.compare_digest(said[-1], proof(token))
