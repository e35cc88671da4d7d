"""Who has the address of an offered file gets it for a while; any other address gets nothing."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from infra.processes import free_port, hold_port
from services import attach
from services.attach import serving

pytestmark = pytest.mark.anyio

CONTENT, DIGEST = bytes(range(256)) * 1000, "ab" * 32
PATH = f"/drafts/{DIGEST}/model.safetensors"


class Offered(NamedTuple):
    """Where a file is served, what asks, and the offer."""

    url: str
    client: httpx.AsyncClient
    told: dict[str, Any]

    async def status(self, url: str) -> int:
        answer = await self.client.get(url)
        assert b"secret" not in answer.content
        return answer.status_code


@asynccontextmanager
async def offered(folder: Path) -> AsyncIterator[Offered]:
    """Offer a file."""
    (file := folder / "model.safetensors").write_bytes(CONTENT)
    (folder / "secret").write_text("secret")
    url = f"http://127.0.0.1:{free_port()}"
    async with serving(url, "127.0.0.1") as offer, httpx.AsyncClient(trust_env=False) as client:
        yield Offered(url, client, offer(file, DIGEST))


async def test_an_offered_file_is_served_whole_and_under_an_address_of_its_own(tmp_path: Path) -> None:
    async with offered(tmp_path) as one:
        answer = await one.client.get(one.told["url"])
        assert (answer.status_code, answer.content) == (200, CONTENT)
        assert one.told["size"] == len(CONTENT) == int(answer.headers["content-length"])
        assert re.fullmatch(rf"{one.url}{PATH}\?expires=\d+&signature=[0-9a-f]{{64}}", one.told["url"])
        (tmp_path / "model.safetensors").unlink()
        assert await one.status(one.told["url"]) == 404


async def test_an_address_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LIFETIME_S", -1)
    async with offered(tmp_path) as one:
        assert await one.status(one.told["url"]) == 403


FORGED = {
    "unsigned": lambda query: PATH,
    "signature": lambda query: f"{PATH}?{query[:-1]}{'1' if query[-1] == '0' else '0'}",
    "later": lambda query: f"{PATH}?{re.sub('expires=.', 'expires=9', query)}",
    "no end": lambda query: f"{PATH}?{re.sub('expires=[0-9]+', 'expires=', query)}",
    "word": lambda query: f"{PATH}?{re.sub('expires=[0-9]+', 'expires=never', query)}",
    "bytes": lambda query: f"{PATH}?{re.sub('signature=.*', 'signature=%ff%00ü', query)}",
    "name": lambda query: f"/drafts/{DIGEST}/secret?{query}",
    "digest": lambda query: f"/drafts/{'0' * 64}/model.safetensors?{query}",
    "up": lambda query: f"/drafts/{DIGEST}/..%2fsecret?{query}",
    "root": lambda query: f"/drafts/..%2f..%2fetc/passwd?{query}",
    "dots": lambda query: f"/drafts/{DIGEST}/%2e%2e%2f%2e%2e%2fsecret?{query}",
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
async def test_no_other_address_is_answered(tmp_path: Path, forge: Callable[[str], str]) -> None:
    async with offered(tmp_path) as one:
        assert await one.status(one.url + forge(one.told["url"].partition("?")[2])) == 403


async def test_nothing_else_is_there_and_another_process_has_another_key(tmp_path: Path) -> None:
    async with offered(tmp_path) as one, offered(tmp_path) as other:
        assert await one.status(one.told["url"].replace(one.url, other.url)) == 403
        for path in ("/", "/drafts/", f"/drafts/{DIGEST}", f"/drafts/{DIGEST}/a/b", "/metrics"):
            assert await one.status(one.url + path) == 404
        assert (await one.client.post(one.told["url"])).status_code == 405


async def test_a_port_that_is_taken_is_told() -> None:
    with hold_port("127.0.0.1", port := free_port()), pytest.raises(OSError, match=f"127.0.0.1', {port}"):
        async with serving(f"http://127.0.0.1:{port}", "127.0.0.1"):
            raise AssertionError("it was bound twice")
