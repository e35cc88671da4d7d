"""Serves files of weights at addresses that are signed and expire, for servers that see no folder of ours.

The key is the process's own: nothing outlives it, so an address is good for a file that this process offered, or for
none. Bytes are not secret on the way unless the address is https, which a proxy before this process has to speak.
"""

import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

LIFETIME_S = 600
SCHEMES = {"http": 80, "https": 443}


class Offers:
    """What may be fetched, by path.

    Attributes:
        url: where servers reach this process.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._key, self._files = secrets.token_bytes(32), dict[str, Path]()

    def offer(self, file: Path, digest: str) -> dict[str, Any]:
        """Return a new address of a file with this sha256, and its size in bytes."""
        path, expires = f"/drafts/{digest}/{file.name}", str(int(time.time()) + LIFETIME_S)
        self._files[path] = file
        url = f"{self.url}{path}?expires={expires}&signature={self._sign(path, expires)}"
        return {"url": url, "size": file.stat().st_size}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with a file; 403 whatever is wrong with the address."""
        expires, signature = (request.query.get(name, "") for name in ("expires", "signature"))
        signed = hmac.compare_digest(signature.encode(), self._sign(request.path, expires).encode())
        if not signed or time.time() > int(expires):
            raise web.HTTPForbidden
        return web.FileResponse(self._files[request.path])

    def _sign(self, path: str, expires: str) -> str:
        return hmac.new(self._key, f"{path}?{expires}".encode(), "sha256").hexdigest()


@asynccontextmanager
async def serving(url: str, host: str) -> AsyncIterator[Callable[[Path, str], dict[str, Any]]]:
    """Serve at the port of a URL, and yield what offers a file; see `Offers`.

    Raises:
        OSError: the port can't be bound.
    """
    offers, parts, app = Offers(url), urlsplit(url), web.Application()
    app.router.add_get("/drafts/{digest}/{name}", offers.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, parts.port or SCHEMES[parts.scheme]).start()
        yield offers.offer
    finally:
        await runner.cleanup()
