"""A draft's file that a server fetches is the one that was announced, or none."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.processes import free_port
from models.engines.vllm.redraft_vllm.swapper import NotFetched, Order, Refused, Swapper, download
from tests.services.played import PlayedServer, Request, chunk, head

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
KIND = "application/octet-stream"
ORDER = {"version": "2", "sha256": SHA256, "parameters": {"fc.weight": ["fc.weight"]}}


def playing(sent: bytes, **how: Any) -> Callable[[Request], AsyncIterator[bytes]]:
    """Play a server that answers bytes, cut where fewer are sent than its head says."""

    async def play(request: Request) -> AsyncIterator[bytes]:
        yield head(KIND, **{"length": len(CONTENT), **how}) + sent
        yield b""

    return play


async def chunked(request: Request) -> AsyncIterator[bytes]:
    yield head(KIND) + chunk(CONTENT) + chunk(b"")


async def redirecting(request: Request) -> AsyncIterator[bytes]:
    place = f"Location: http://{request.headers['host']}/elsewhere\r\n\r\n".encode()
    yield head(KIND, "302 Found", length=0)[:-2] + place


async def zipped(request: Request) -> AsyncIterator[bytes]:
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
def test_what_was_not_announced_is_refused(tmp_path: Path, play: Any, said: str) -> None:
    async def run() -> None:
        async with PlayedServer(play) as server:
            with pytest.raises(ValueError, match=said):
                await asyncio.to_thread(
                    download, f"{server.url}/a?signature=b", tmp_path / "file", len(CONTENT), SHA256
                )
            assert [request.target for request in server.requests] == ["/a?signature=b"]

    asyncio.run(run())


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_proxy_of_the_environment_is_asked_for_every_file_but_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def run() -> None:
        async with PlayedServer(playing(CONTENT)) as server, PlayedServer(playing(CONTENT)) as proxy:
            monkeypatch.setenv(name, proxy.url)
            port = server.url.rpartition(":")[2]
            for url in (f"{server.url}/a", f"http://localhost:{port}/a", "http://weights.example/a?signature=b"):
                await asyncio.to_thread(download, url, tmp_path / "file", len(CONTENT), SHA256)
            assert [request.target for request in server.requests] == ["/a", "/a"]
            assert [request.target for request in proxy.requests] == ["http://weights.example/a?signature=b"]

    for other in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.upper(), raising=False)
    asyncio.run(run())


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
        Order(**ORDER, **where)


class PlayedEngine:
    """Answers as vLLM does whose one rank has no draft in memory, and takes none."""

    def __init__(self) -> None:
        self.read: list[tuple[Path, bytes]] = []

    async def is_sleeping(self) -> bool:
        return False

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **_: object) -> list[dict[str, Any]]:
        if method == "redraft_stage" and args[1]:
            file = Path(args[1]) / "model.safetensors"
            self.read.append((file, file.read_bytes()))
        return [{"rank": 0, "ok": method == "redraft_discard", "error": "not wanted", "digest": ""}]


@pytest.mark.parametrize(("sent", "error"), [(CONTENT, Refused), (CONTENT[::-1], NotFetched)])
def test_ranks_read_a_fetched_file_once_its_sum_is_right_and_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, error: type[Exception]
) -> None:
    async def run() -> None:
        engine = PlayedEngine()
        async with PlayedServer(playing(sent)) as server:
            order = Order(**ORDER, url=f"{server.url}/file", size=len(CONTENT))
            with pytest.raises(error):
                await Swapper(engine).swap(order)
        assert [content for _, content in engine.read] == ([CONTENT] if error is Refused else [])
        assert all(file.is_relative_to(tmp_path) for file, _ in engine.read)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asyncio.run(run())
    assert [*tmp_path.iterdir()] == []
