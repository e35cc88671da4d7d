"""A server tells who knows its token which server and draft gave an answer, and no draft where there were two."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from models.engines.vllm.redraft_vllm.routes import DraftRoutes
from models.engines.vllm.redraft_vllm.served import ASKED, TOKEN, TOLD, ServedBy, proof, read_told
from models.engines.vllm.redraft_vllm.swapper import Broken, Order, Refused, Swapper

Meanwhile = Callable[[], Awaitable[object]]
ORDER = {"path": "/drafts/8", "sha256": "0" * 64, "parameters": {"fc.weight": ["fc.weight"]}}
EVENTS = [b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"]
KNOWN = {ASKED.decode(): proof("token").decode()}


class PlayedEngine:
    """Answers what a `Swapper` asks vLLM's engine; what it answers to a method may be another thing."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    async def collective_rpc(self, method: str, **_: object) -> list[dict[str, Any]]:
        return [{"rank": 0, "ok": True, "error": "", "reading": False, "worst": 0.0} | self._answers.get(method, {})]

    async def is_sleeping(self) -> bool:
        return False

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        return True

    async def update_weight_version(self, version: str) -> None:
        pass


def swapper(engine: PlayedEngine, version: str = "7") -> Swapper:
    made = Swapper(engine, server="host:8000")
    made.version = version
    return made


def served(swapper: Swapper, meanwhile: Meanwhile) -> httpx.AsyncClient:
    """Return the client of a server with the plugin, in which something happens while it answers."""

    async def answer(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield EVENTS[0]
            await meanwhile()
            yield EVENTS[1]

        if request.url.path == "/stream":
            return StreamingResponse(events(), media_type="text/event-stream")
        await meanwhile()
        return JSONResponse({})

    app = FastAPI(openapi_url=None, routes=[Route("/{kind}", answer)])
    DraftRoutes().attach_router(app)
    app.state.redraft_swapper = swapper
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def told(swapper: Swapper, meanwhile: Meanwhile, kind: str) -> ServedBy:
    async with served(swapper, meanwhile) as http:
        answer = await http.get(f"/{kind}", headers=KNOWN)
    if kind == "whole":
        return read_told(answer.headers[TOLD.decode()].encode())
    assert TOLD.decode() not in answer.headers
    first, comment, last, rest = answer.content.split(b"\n\n")
    assert ([first, last], rest) == ([one.strip() for one in EVENTS], b"")
    return read_told(comment.removeprefix(b": redraft "))


async def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "token")


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_an_answer_tells_its_server_and_the_draft_that_all_of_it_has(kind: str) -> None:
    assert await told(swapper(PlayedEngine()), nothing, kind) == ("host:8000", "7")
    assert await told(swapper(PlayedEngine(), "start-up"), nothing, kind) == ("host:8000", "")
    one = swapper(PlayedEngine())

    async def there_and_back() -> None:
        for version in ("8", "7"):
            await one.swap(Order(version=version, **ORDER))

    assert await told(one, there_and_back, kind) == ("host:8000", "")
    assert await told(one, nothing, kind) == ("host:8000", "7")


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_a_draft_that_is_being_loaded_or_was_taken_back_names_no_answer(kind: str) -> None:
    refusing = swapper(PlayedEngine(redraft_verify={"worst": 1.0}))

    async def refused() -> None:
        with pytest.raises(Refused, match="is off by"):
            await refusing.swap(Order(version="8", **ORDER))

    assert await told(refusing, refused, kind) == ("host:8000", "")
    assert await told(refusing, nothing, kind) == ("host:8000", "7")
    broken = swapper(PlayedEngine(redraft_verify={"ok": False}, redraft_revert={"ok": False}))
    with pytest.raises(Broken):
        await broken.swap(Order(version="8", **ORDER))
    assert await told(broken, nothing, kind) == ("host:8000", "")
    is_loading, may_end = asyncio.Event(), asyncio.Event()

    class Slow(PlayedEngine):
        async def update_weight_version(self, version: str) -> None:
            is_loading.set()
            await may_end.wait()

    slow = swapper(Slow())
    swapping = asyncio.create_task(slow.swap(Order(version="8", **ORDER)))
    await is_loading.wait()
    assert await told(slow, nothing, kind) == ("host:8000", "")
    may_end.set()
    await swapping
    assert await told(slow, nothing, kind) == ("host:8000", "8")


@pytest.mark.parametrize("asked", [{}, {ASKED.decode(): "token"}, {ASKED.decode(): proof("other").decode()}])
async def test_who_does_not_show_that_the_token_is_known_is_told_nothing(asked: dict[str, str]) -> None:
    async with served(swapper(PlayedEngine()), nothing) as http:
        assert (await http.get("/stream", headers=asked)).content == b"".join(EVENTS)
        assert TOLD.decode() not in (await http.get("/whole", headers=asked)).headers


async def test_a_server_without_a_token_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    async with served(swapper(PlayedEngine()), nothing) as http:
        assert (await http.get("/stream", headers={ASKED.decode(): proof("").decode()})).content == b"".join(EVENTS)


def test_what_vllm_counts_is_told_since_the_draft_serves_and_by_position() -> None:
    names = {"num_drafts": "drafts", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}
    labels = ["model_name", "engine"]
    made = {name: Counter(f"vllm:spec_decode_{name}", name, labels).labels("target", "0") for name in names}
    by_place = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "places", [*labels, "position"])
    try:
        made["num_drafts"].inc(5)
        one = swapper(PlayedEngine())
        for name, more in {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 12}.items():
            made[name].inc(more)
        for place, more in enumerate((8, 4, 0)):
            by_place.labels("target", "0", str(place)).inc(more)
        since = one.status()["since"]
    finally:
        for collector in {*REGISTRY._names_to_collectors.values()}:
            if getattr(collector, "_name", "").startswith("vllm:spec_decode"):
                REGISTRY.unregister(collector)
    wanted = {"drafts": 10, "drafted": 30, "accepted": 12, "accepted_0": 8, "accepted_1": 4, "accepted_2": 0}
    assert since == wanted | {"mean_accepted_length": 2.2}


@pytest.mark.parametrize("said", [b"", b"{}", b"[1, 2]", b'["a", 7]', b'["a b", "7"]', b'["host:1"]', b"[null, null]"])
def test_what_can_not_be_read_names_nothing(said: bytes) -> None:
    assert read_told(said) == ("", "")
