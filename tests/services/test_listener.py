"""A replica's own server on a Unix socket; test_reverse_proxy.py has HAProxy before it."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from services.listener import listening

pytestmark = pytest.mark.anyio


async def test_it_listens_for_as_long_as_the_apps_lifespan_lasts(tmp_path: Path) -> None:
    path, ended = tmp_path / "socket", asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            ended.set()
        else:
            await PlainTextResponse("here")(scope, receive, send)

    told, said = asyncio.Queue[Message](), asyncio.Queue[Message]()
    lifespan = asyncio.create_task(listening(app, path, 1.0)({"type": "lifespan"}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    await said.get()
    assert path.stat().st_mode & 0o777 == 0o600
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as asked:
        assert (await asked.get("/")).text == "here"
    await told.put({"type": "lifespan.shutdown"})
    await lifespan
    assert ended.is_set()
    assert not path.exists()
