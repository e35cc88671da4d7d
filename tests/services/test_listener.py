"""A replica's own server on a Unix socket; test_reverse_proxy.py has HAProxy before it."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from services.listener import Listener, listening

pytestmark = pytest.mark.anyio


def client(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://replica")


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
    async with client(path) as asked:
        assert (await asked.get("/")).text == "here"
    await told.put({"type": "lifespan.shutdown"})
    await lifespan
    assert ended.is_set()
    assert not path.exists()


async def test_the_next_one_takes_its_place_and_what_it_accepted_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    accepted, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        accepted.set()
        await go_on.wait()
        await PlainTextResponse("first")(scope, receive, send)

    first = await Listener.start(slow, path, 5.0)
    async with client(path) as asked, client(path) as other:
        answer = asyncio.create_task(asked.get("/"))
        await accepted.wait()
        second = await Listener.start(PlainTextResponse("second"), path, 1.0)
        ending = asyncio.create_task(first.close())
        assert (await other.get("/")).text == "second"
        go_on.set()
        assert (await answer).text == "first"
        await ending
        assert path.exists()
    await second.close()
    assert not path.exists()
