"""Who has the address of an offered file gets it for a while; any other address gets nothing."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.processes import free_port, hold_port
from services import attach
from services.attach import serving

CONTENT, DIGEST = bytes(range(256)) * 1000, "ab" * 32
PATH = f"/drafts/{DIGEST}/model.safetensors"

Ask = Callable[[str], Awaitable[httpx.Response]]


@asynccontextmanager
async def offered(folder: Path) -> AsyncIterator[tuple[str, Ask, dict[str, Any]]]:
    """Offer a file; yield where it is served, what asks, and the offer."""
    (file := folder / "model.safetensors").write_bytes(CONTENT)
    (folder / "secret").write_text("secret")
    url = f"http://127.0.0.1:{free_port()}"
    async with serving(url, "127.0.0.1") as offer, httpx.AsyncClient(trust_env=False) as client:
        yield url, client.get, offer(file, DIGEST)


def test_an_offered_file_is_served_whole_and_under_an_address_of_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with offered(tmp_path) as (url, ask, offer):
            answer = await ask(offer["url"])
            assert (answer.status_code, answer.content) == (200, CONTENT)
            assert offer["size"] == len(CONTENT) == int(answer.headers["content-length"])
            assert re.fullmatch(rf"{url}{PATH}\?expires=\d+&signature=[0-9a-f]{{64}}", offer["url"])
            (tmp_path / "model.safetensors").unlink()
            assert (await ask(offer["url"])).status_code == 404

    asyncio.run(run())


def test_an_address_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LIFETIME_S", -1)

    async def run() -> None:
        async with offered(tmp_path) as (_, ask, offer):
            assert (await ask(offer["url"])).status_code == 403

    asyncio.run(run())


@pytest.mark.parametrize(
    "forge",
    [
        lambda path, query: path,
        lambda path, query: f"{path}?{query[:-1]}{'1' if query[-1] == '0' else '0'}",
        lambda path, query: f"{path}?{re.sub('expires=.', 'expires=9', query)}",
        lambda path, query: f"{path}?{re.sub('expires=[0-9]+', 'expires=', query)}",
        lambda path, query: f"{path}?{re.sub('expires=[0-9]+', 'expires=never', query)}",
        lambda path, query: f"{path}?{re.sub('signature=.*', 'signature=%ff%00ü', query)}",
        lambda path, query: f"/drafts/{DIGEST}/secret?{query}",
        lambda path, query: f"/drafts/{'0' * 64}/model.safetensors?{query}",
        lambda path, query: f"/drafts/{DIGEST}/..%2fsecret?{query}",
        lambda path, query: f"/drafts/..%2f..%2fetc/passwd?{query}",
        lambda path, query: f"/drafts/{DIGEST}/%2e%2e%2f%2e%2e%2fsecret?{query}",
    ],
    ids=["unsigned", "signature", "later", "no end", "word", "bytes", "name", "digest", "up", "root", "dots"],
)
def test_no_other_address_is_answered(tmp_path: Path, forge: Callable[[str, str], str]) -> None:
    async def run() -> None:
        async with offered(tmp_path) as (url, ask, offer):
            answer = await ask(url + forge(PATH, offer["url"].partition("?")[2]))
            assert answer.status_code == 403 and b"secret" not in answer.content

    asyncio.run(run())


def test_nothing_else_is_there_and_another_process_has_another_key(tmp_path: Path) -> None:
    async def run() -> None:
        async with offered(tmp_path) as (url, ask, offer), offered(tmp_path) as (other, *_):
            assert (await ask(offer["url"].replace(url, other))).status_code == 403
            for path in ("/", "/drafts/", f"/drafts/{DIGEST}", f"/drafts/{DIGEST}/a/b", "/metrics"):
                assert (await ask(url + path)).status_code == 404
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.post(offer["url"])).status_code == 405

    asyncio.run(run())


def test_a_port_that_is_taken_is_told() -> None:
    async def run(port: int) -> None:
        async with serving(f"http://127.0.0.1:{port}", "127.0.0.1"):
            raise AssertionError("it was bound twice")

    with hold_port("127.0.0.1", port := free_port()), pytest.raises(OSError, match=f"127.0.0.1', {port}"):
        asyncio.run(run(port))
