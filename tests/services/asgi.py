"""One request to an ASGI application, without a server."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Headers


async def ask(
    app: ASGIApp,
    chunks: Sequence[bytes] = (b"",),
    path: str = "/v1/models",
    headers: Sequence[tuple[str, str | bytes]] = (),
    stall: bool = False,
    **scope: Any,
) -> Answer:
    """Post a body in chunks, after which nothing comes; of one that stalls the last chunk is not the end."""
    messages = [
        {"type": "http.request", "body": chunk, "more_body": stall or index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode() if isinstance(value, str) else value) for name, value in headers]
    told = {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b"", **scope}
    await app(told, receive, send)
    return Answer(sent[0]["status"], b"".join(one.get("body", b"") for one in sent), Headers(raw=sent[0]["headers"]))
