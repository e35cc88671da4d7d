"""The replica's own HTTP server, on a socket that only the proxy before it can reach (services/reverse_proxy.py)."""

import os
import socket
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BACKLOG = 1024


def made_ready(app: ASGIApp, drain_s: float, **settings: Any) -> uvicorn.Server:
    """Return a server to start by its parts: its main loop would wake the process ten times a second."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="critical",  # what it tells of a failure quotes the request; whoever answers has told it
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, int(drain_s)),
        **settings,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


class Listener:
    """A server on a Unix socket; made by `start`, ended by `close`."""

    def __init__(self, server: uvicorn.Server, listened: socket.socket, path: Path) -> None:
        self._server, self._listened, self._path = server, listened, path
        self._inode = path.stat().st_ino

    @classmethod
    async def start(cls, app: ASGIApp, path: Path, drain_s: float) -> "Listener":
        """Listen at a path that only this user can reach, in the place of whoever listened there and ends by itself."""
        server = made_ready(app, drain_s, forwarded_allow_ips="*")  # of whoever reaches the socket
        listened = socket.socket(socket.AF_UNIX)
        made = path.with_name(f"{path.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        listened.bind(str(made))
        made.chmod(0o600)
        listened.listen(BACKLOG)
        await server.startup(sockets=[listened])
        made.rename(path)  # only now: whoever connects is answered
        return cls(server, listened, path)

    async def close(self) -> None:
        """Accept no more, and wait for what runs."""
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()
        await self._server.shutdown(sockets=[self._listened])


def listening(app: ASGIApp, path: Path, drain_s: float) -> ASGIApp:
    """Return `app`, which also listens at a path for as long as its lifespan lasts; see `Listener.start`."""
    listener: Listener | None = None

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        async def seen() -> Message:
            nonlocal listener
            message = await receive()
            if message["type"] == "lifespan.startup":
                listener = await Listener.start(app, path, drain_s)
            elif message["type"] == "lifespan.shutdown" and listener is not None:
                await listener.close()
            return message

        await app(scope, seen if scope["type"] == "lifespan" else receive, send)

    return both
