"""Record the requests to somebody else's server: pass each on, and log those whose client consented.

    python -m services.record --config FILE

A process of its own without Ray, MLflow, torch or vLLM, so that it starts in a second and goes on while all else of
redraft is down. What may be logged becomes a row as in a replica of ours (services/recorder.py). A row names the server
and the draft that answered where the server's plugin tells them with the answer (redraft_vllm/served.py), which it does
to those who have its token.

What belongs to one connection is each side's own. A client that leaves is told to the server at once, by closing the
connection; an answer that the server cuts is cut for the client too.
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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
from multidict import CIMultiDict
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory
from yarl import URL

from infra.home import home_secret
from infra.keys import keys_path
from infra.querylog import BackgroundWriter, QueryLog
from infra.settings import ATTACH_TOKEN, RECORD_CONFIG, AbsolutePath, Settings
from models.engines.vllm.redraft_vllm.served import proof
from models.markers import Markers
from models.params import validate
from models.types import Frozen
from services.access import Keys, RequestError
from services.http_server import BACKLOG, made_ready
from services.recorder import SAMPLING, Recorder
from services.recording_middleware import ClientLeft, RawHeaders, RecordingMiddleware, RequestBody

CONNECT_S, DRAIN_S = 10.0, 20.0
KEEP_S = 3.0  # vLLM closes an idle connection after 5 s
MAX_HEADER_BYTES = 1 << 16
# Of one connection, not of a request (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}

log = logging.getLogger(__name__)


class RecordedTarget(Frozen):
    """What is recorded of a server that records itself; settings come without clients' keys."""

    models: tuple[str, ...] = Field(min_length=1)  # the target's names there; requests for others pass unlogged
    target_dir: AbsolutePath
    target_version: int = Field(ge=0)
    settings: Settings


class RecordConfig(RecordedTarget):
    """What is recorded before a server elsewhere."""

    server: str  # its URL, without `/v1`
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    ca: str = ""  # file of the certificates that sign the server's, "" for the system's


def default_sampling(target_dir: Path) -> dict[str, Any]:
    """Return how vLLM samples where a request says nothing: as the target's generation_config.json has it."""
    file = target_dir / "generation_config.json"
    told = json.loads(file.read_bytes()) if file.is_file() else {}
    numbers = {name: told[name] for name in SAMPLING if isinstance(told.get(name), int | float)}
    return {"temperature": 1.0, **numbers}


class ForwardingApp:
    """The ASGI app before one server; without an answer it answers 502."""

    def __init__(self, http: aiohttp.ClientSession, server: str) -> None:
        """Ask `server`, a URL without `/v1`, by `http`."""
        self._http, self._server = http, server
        self._is_away = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what cut an answer that had begun is raised."""
        body, answering = RequestBody(receive), asyncio.current_task()
        assert answering is not None, "an app is awaited by a task"

        async def leave() -> None:
            await body.until_left()
            answering.cancel()

        leaving = asyncio.create_task(leave())
        try:
            await self._pass(scope, body, send)
        except asyncio.CancelledError:
            if not body.is_left or answering.uncancel():
                raise
        except ClientLeft:
            pass
        finally:
            leaving.cancel()

    async def _pass(self, scope: Scope, body: RequestBody, send: Send) -> None:
        try:
            answer = await self._ask(scope, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            if body.is_left:
                return
            if not self._is_away:  # once, and not for each request
                log.warning("%s does not answer (%s)", self._server, type(error).__name__)
            self._is_away = True
            message = f"the server behind this one does not answer ({type(error).__name__})"
            await RequestError(502, message, code="bad_gateway").response()(scope, body.again(), send)
            return
        self._is_away = False
        try:
            headers = passed(answer.raw_headers)
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            while part := await answer.content.readany():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            answer.close()

    async def _ask(self, scope: Scope, body: RequestBody) -> aiohttp.ClientResponse:
        """Send a request on, and return the answer as soon as its headers are there."""
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url = URL(f"{self._server}{scope['raw_path'].decode('latin-1')}{query}", encoded=True)
        content: bytes | AsyncIterator[bytes] | None = await body.start(0)
        if not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
            content = None
        elif content is None:
            content = body.parts()
        sent = [one for one in passed(scope["headers"], b"host") if not one[0].startswith(b"x-redraft-")]
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in sent)
        return await self._http.request(scope["method"], url, headers=headers, data=content, allow_redirects=False)


def passed(headers: RawHeaders, *left_out: bytes) -> RawHeaders:
    """Return what of a message's headers is not of one connection, nor named to be left out."""
    said = [value for name, value in headers if name.lower() == b"connection"]
    own = {*HOP_BY_HOP, *left_out, *(part.strip().lower() for value in said for part in value.split(b","))}
    return [(name, value) for name, value in headers if name.lower() not in own]


class Recording:
    """An app, recorded from now on, in the event loop that runs: `app` is to be asked in its place."""

    def __init__(self, server: ASGIApp, target: RecordedTarget, token: str) -> None:
        """Start it; the token is the plugin's, "" if the server has none."""
        thread = ThreadPoolExecutor(1)
        self.markers = markers = thread.submit(Markers.read, target.target_dir)  # ValueError if they can't be read
        thread.shutdown(wait=False)
        self._recorder = Recorder(
            BackgroundWriter(QueryLog(target.settings.querylog)),
            lambda ids, change: markers.result().rewrite(ids, change),
            target.target_version,
        )
        self.app = RecordingMiddleware(
            server,
            target.models,
            self._recorder,
            proof(token) if token else b"",
            Keys(keys_path(target.settings), loopback=False),
            home_secret(target.settings.home),
            default_sampling(target.target_dir),
            lambda token_id: not markers.done() or markers.result().knows(token_id),
        )

    async def close(self) -> None:
        log.info("%s", json.dumps(self.app.status()))
        await asyncio.to_thread(self._recorder.close)


class RecordedServer:
    """What `vllm serve --middleware services.record.RecordedServer` loads: the server records itself."""

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
    """Pass requests on until SIGTERM or SIGINT, then let the running ones end; ValueError if that can't begin."""
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
    family, is_6 = (socket.AF_INET6, True) if ":" in host else (socket.AF_INET, False)
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_6)
    except OSError as error:
        raise ValueError(f"port {port} of {host} can't be bound: {error.strerror}") from error


async def _serve(recording: Recording, listened: socket.socket) -> None:
    """Serve until a signal comes; ValueError if what is read meanwhile can't be."""
    server = made_ready(recording.app, DRAIN_S, proxy_headers=False)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await server.startup(sockets=[listened])
    try:
        await asyncio.wrap_future(recording.markers)
        await told.wait()
    finally:
        await server.shutdown(sockets=[listened])


def main(argv: list[str] | None = None) -> int:
    """Run until a signal comes; return 2, with a line that says why, if nothing can be recorded so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        path = parser.parse_args(argv).config
        config = validate(RecordConfig, json.loads(path.read_bytes()), str(path))
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(record(config, os.environ.get(ATTACH_TOKEN, "")))
    except (ValueError, OSError) as error:
        print(f"services.record: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
