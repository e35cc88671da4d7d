import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from models.serving import Limits
from services.access import Refusal
from services.bodies import bounded

LIMITS = Limits(max_body_bytes=10, body_timeout_s=0.1)


async def count(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"bytes": len(await Request(scope, receive).body())})(scope, receive, send)


def ask(chunks: Sequence[bytes] = (b"",), length: bytes = b"", stall: bool = False) -> dict[str, Any]:
    """Send one request through the layer and return the answer."""
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

    headers = [(b"content-length", length)] if length else []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    asyncio.run(bounded(count, LIMITS)(scope, receive, send))
    return dict(json.loads(sent[1]["body"]))


@pytest.mark.parametrize(
    ("chunks", "length"),
    [([b""], b"11"), ([b"x" * 6, b"x" * 5], b""), ([b""], b"9" * 5000)],
    ids=["declared", "chunked", "absurd"],
)
def test_a_body_over_the_limit_is_413(chunks: list[bytes], length: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        ask(chunks, length)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_a_body_of_the_limit_arrives_whole() -> None:
    assert ask([b"12345", b"67890"]) == {"bytes": 10}


def test_a_body_that_does_not_arrive_is_408_and_the_connection_ends() -> None:
    with pytest.raises(Refusal, match="longer than 0.1 s") as refused:
        ask([b"1"], stall=True)
    assert refused.value.status == 408
    assert refused.value.response().headers["connection"] == "close"


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"\xb2"])
def test_a_content_length_that_is_no_number_is_400(length: bytes) -> None:
    with pytest.raises(Refusal, match="not a number") as refused:
        ask(length=length)
    assert refused.value.status == 400
