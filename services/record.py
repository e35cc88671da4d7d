"""Record the requests to somebody else's server: pass each on, and log those whose client consented.

    python -m services.record --config FILE

A process of its own without Ray, MLflow, torch or vLLM, so that it starts in a second and goes on while all else of
redraft is down. What may be logged becomes a row as in a replica of ours (services/recorder.py). A row says which draft
answered only where the server said the same version before the request began and after it ended; without the plugin's
token it says none.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory

from infra.keys import keys_path
from infra.logwriter import BackgroundWriter
from infra.querylog import QueryLog
from infra.secret import home_secret
from infra.settings import ATTACH_TOKEN, RECORD_CONFIG, AbsolutePath, Settings
from models.markers import Markers
from models.params import validate
from models.types import Frozen
from services.access import Keys
from services.forwarding import ForwardingApp
from services.recorder import SAMPLING, Recorder
from services.recording_middleware import DraftVersions, RecordingMiddleware

CONNECT_S, DRAIN_S = 10.0, 20.0
KEEP_S = 3.0  # vLLM closes an idle connection after 5 s
BACKLOG = 1024
MAX_HEADER_BYTES = 1 << 16

log = logging.getLogger(__name__)


class RecordedTarget(Frozen):
    """What is recorded of a server that records itself.

    Attributes:
        models: names by which the server knows the target; requests for others pass unlogged.
        target_dir: the target's Hugging Face directory.
        target_version: its number in the registry.
        settings: where everything lies, without clients' keys.
    """

    models: tuple[str, ...] = Field(min_length=1)
    target_dir: AbsolutePath
    target_version: int = Field(ge=0)
    settings: Settings


class RecordConfig(RecordedTarget):
    """What is recorded before a server elsewhere.

    Attributes:
        server: URL of the server, without `/v1`.
        host, port: where clients ask.
        ca: file of the certificates that sign the server's, "" for the system's.
    """

    server: str
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    ca: str = ""


def default_sampling(target_dir: Path) -> dict[str, Any]:
    """Return how vLLM samples where a request says nothing: as the target's generation_config.json has it."""
    file = target_dir / "generation_config.json"
    told = json.loads(file.read_bytes()) if file.is_file() else {}
    numbers = {name: told[name] for name in SAMPLING if isinstance(told.get(name), int | float)}
    return {"temperature": 1.0, **numbers}


class Recording:
    """An app, recorded from now on, in the event loop that runs.

    Attributes:
        app: what is to be asked in its place.
        markers: of the target's tokenizer, which is being read; ValueError if it can't be.
    """

    def __init__(self, server: ASGIApp, target: RecordedTarget, token: str) -> None:
        """Start it; the token is the plugin's, "" if the server has none."""
        thread = ThreadPoolExecutor(1)
        self.markers = markers = thread.submit(Markers.read, target.target_dir)
        thread.shutdown(wait=False)
        self._recorder = Recorder(
            BackgroundWriter(QueryLog(target.settings.querylog)),
            lambda ids, change: markers.result().rewrite(ids, change),
            target.target_version,
        )
        self._versions = DraftVersions(server, token)
        self.app = RecordingMiddleware(
            server,
            target.models,
            self._recorder,
            self._versions,
            Keys(keys_path(target.settings), loopback=False),
            home_secret(target.settings.home),
            default_sampling(target.target_dir),
            lambda token_id: not markers.done() or markers.result().knows(token_id),
        )
        self._asking = asyncio.create_task(self._versions.run())

    async def close(self) -> None:
        """Write what is due."""
        self._asking.cancel()
        self._versions.close()
        log.info("%s", json.dumps(self.app.status()))
        await asyncio.to_thread(self._recorder.close)


class RecordedServer:
    """The class that `vllm serve --middleware services.record.RecordedServer` loads: the server records itself."""

    def __init__(self, app: ASGIApp) -> None:
        """Read what RECORD_CONFIG names; ValueError if that can't be recorded."""
        if not (path := os.environ.get(RECORD_CONFIG)):
            raise ValueError(f"set {RECORD_CONFIG} to the file that `redraft record --model NAME` writes")
        target = validate(RecordedTarget, json.loads(Path(path).read_bytes()), path)
        self._recording = Recording(app, target, os.environ.get(ATTACH_TOKEN, ""))
        self._recording.markers.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run for as long as the server does, which does not wait after its last message."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._recording.close()
            await send(message)

        await self._recording.app(scope, receive, closing if scope["type"] == "lifespan" else send)


async def record(config: RecordConfig, token: str) -> None:
    """Pass requests on until SIGTERM or SIGINT, then let the running ones end.

    Raises:
        ValueError: the port can't be bound, or the certificates or the target's tokenizer can't be read.
    """
    try:
        verify = ssl.create_default_context(cafile=config.ca or None)
    except OSError as error:
        raise ValueError(f"{config.ca} holds no certificates: {error}") from error
    listened = _listen(config.host, config.port)
    async with _client(verify) as http:
        recording = Recording(ForwardingApp(http, config.server.rstrip("/")), config, token)
        try:
            await _serve(recording, listened)
        finally:
            await recording.close()


def _client(verify: ssl.SSLContext) -> aiohttp.ClientSession:
    """Return what asks the server: it keeps connections, and neither adds to a request nor changes an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S, ssl=verify),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        auto_decompress=False,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen, so that whoever connects from now on is answered; ValueError if the address can't be bound."""
    listened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listened.bind((host, port))
        listened.listen(BACKLOG)
    except OSError as error:
        listened.close()
        raise ValueError(f"port {port} of {host} can't be bound: {error.strerror}") from error
    return listened


async def _serve(recording: Recording, listened: socket.socket) -> None:
    """Serve until a signal comes; ValueError if what is read meanwhile can't be."""
    config = uvicorn.Config(
        recording.app,
        lifespan="off",
        proxy_headers=False,
        ws="none",
        log_config=None,
        log_level="critical",  # what it tells of a failure quotes the request
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await server.startup(sockets=[listened])
    try:
        await asyncio.wrap_future(recording.markers)
        await told.wait()
    finally:
        await server.shutdown(sockets=[listened])


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run until a signal comes; return 2, with a line that says why, if nothing can be recorded so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        path = parser.parse_args(argv).config
        config = validate(RecordConfig, json.loads(path.read_bytes()), str(path))
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(record(config, environment.get(ATTACH_TOKEN, "")))
    except (ValueError, OSError) as error:
        print(f"services.record: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
