"""A server with the plugin tells which draft gave an answer, and fetches the draft that was announced or none."""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, Counter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infra.processes import free_port
from models.engines.vllm.redraft_vllm.routes import DraftRoutes
from models.engines.vllm.redraft_vllm.served import ASKED, TOKEN, TOLD, ServedBy, proof, read_told
from models.engines.vllm.redraft_vllm.swapper import Broken, NotFetched, Order, Refused, Swapper, download
from tests.services.played import PlayedServer, chunk, head
from tests.services.played import Request as Played

Meanwhile = Callable[[], Awaitable[object]]
ORDER = {"path": "/drafts/8", "sha256": "0" * 64, "parameters": {"fc.weight": ["fc.weight"]}}
EVENTS = [b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"]
KNOWN = {ASKED.decode(): proof("token").decode()}


class PlayedEngine:
    """Answers what a `Swapper` asks vLLM's engine; what it answers to a method may be another thing."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.read: list[tuple[Path, bytes]] = []  # what a rank would read

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **_: object) -> list[dict[str, Any]]:
        if method == "redraft_stage" and (file := Path(args[1]) / "model.safetensors").is_file():
            self.read.append((file, file.read_bytes()))
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


CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
KIND = "application/octet-stream"
FETCHED = {"version": "2", "sha256": SHA256, "parameters": {"fc.weight": ["fc.weight"]}}


def playing(sent: bytes, **how: Any) -> Callable[[Played], AsyncIterator[bytes]]:
    """Play a server that answers bytes, cut where fewer are sent than its head says."""

    async def play(request: Played) -> AsyncIterator[bytes]:
        yield head(KIND, **{"length": len(CONTENT), **how}) + sent
        yield b""

    return play


async def chunked(request: Played) -> AsyncIterator[bytes]:
    yield head(KIND) + chunk(CONTENT) + chunk(b"")


async def redirecting(request: Played) -> AsyncIterator[bytes]:
    place = f"Location: http://{request.headers['host']}/elsewhere\r\n\r\n".encode()
    yield head(KIND, "302 Found", length=0)[:-2] + place


async def zipped(request: Played) -> AsyncIterator[bytes]:
    yield head(KIND, length=len(CONTENT))[:-2] + b"Content-Encoding: gzip\r\n\r\n" + CONTENT


FAULTS = [
    (playing(CONTENT[:-1] + b"x"), f"wanted {len(CONTENT)} with {SHA256}"),
    (playing(CONTENT[:-1]), "ChunkedEncodingError|ConnectionError"),
    (playing(CONTENT + b"x", length=len(CONTENT) + 1), f"200 with {len(CONTENT) + 1} bytes"),
    (playing(CONTENT, status="403 Forbidden"), "the answer is 403"),
    (chunked, "200 with None bytes"),
    (redirecting, "the answer is 302"),
    (zipped, "ContentDecodingError"),
]


@pytest.mark.parametrize(
    ("play", "said"), FAULTS, ids=["spoiled", "cut", "longer", "forbidden", "unsized", "redirect", "zipped"]
)
async def test_what_was_not_announced_is_refused(tmp_path: Path, play: Any, said: str) -> None:
    async with PlayedServer(play) as server:
        with pytest.raises(ValueError, match=said):
            await asyncio.to_thread(download, f"{server.url}/a?b=c", tmp_path / "file", len(CONTENT), SHA256)
        assert [request.target for request in server.requests] == ["/a?b=c"]


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
async def test_a_proxy_of_the_environment_is_asked_for_every_file_but_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in ("http_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    async with PlayedServer(playing(CONTENT)) as server, PlayedServer(playing(CONTENT)) as proxy:
        monkeypatch.setenv(name, proxy.url)
        port = server.url.rpartition(":")[2]
        for url in (f"{server.url}/a", f"http://localhost:{port}/a", "http://weights.example/a?signature=b"):
            await asyncio.to_thread(download, url, tmp_path / "file", len(CONTENT), SHA256)
        assert [request.target for request in server.requests] == ["/a", "/a"]
        assert [request.target for request in proxy.requests] == ["http://weights.example/a?signature=b"]


def test_a_server_that_is_away_is_told_without_what_was_signed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ConnectionError: .*refused") as told:
        download(f"http://127.0.0.1:{free_port()}/a?signature=secret", tmp_path / "file", 1, SHA256)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"path": "/a", "url": "http://a", "size": 1},
        {"url": "http://a"},
        {"path": "/a", "size": 1},
        {"url": "file:///etc/passwd", "size": 1},
        {"url": "ftp://a/b", "size": 1},
        {"url": "http://a", "size": -1},
    ],
)
def test_an_order_says_in_one_way_where_the_file_is(where: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Order(**FETCHED, **where)


@pytest.mark.parametrize(("sent", "error"), [(CONTENT, Refused), (CONTENT[::-1], NotFetched)])
async def test_ranks_read_a_fetched_file_once_its_sum_is_right_and_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, error: type[Exception]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = PlayedEngine(redraft_stage={"ok": False, "error": "not wanted"})
    async with PlayedServer(playing(sent)) as server:
        with pytest.raises(error):
            await Swapper(engine).swap(Order(**FETCHED, url=f"{server.url}/file", size=len(CONTENT)))
    assert [content for _, content in engine.read] == ([CONTENT] if error is Refused else [])
    assert all(file.is_relative_to(tmp_path) for file, _ in engine.read)
    assert os.listdir(tmp_path) == []
