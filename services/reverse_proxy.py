"""What stands between clients and the replica's own server: HAProxy or, where it does not run, Ray Serve's proxy.

HAProxy bounds connections, headers and their time. It answers for a replica that is not there, and ends the stream of
one that was lost (guard.lua). It has no page of statistics and no socket for commands. Once a request's headers are
known, each answer of its own has OpenAI's error shape; headers that are no HTTP, too large or too slow get its built-in
400 or 408, which can't be replaced.

Left to itself, Serve's proxy obeys a client's headers (a time limit that cuts streams, an id that it can't decode),
reads a body however large or slow, shows its own routes to anyone, answers overload as plain text, tells the text of a
crash and lets the stream of a killed replica end without a word. So `RequestMiddleware` stands in it, before a request
takes a slot of the replica, and after it. Nothing bounds connections there, nor how long their headers take.
"""

import ctypes
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from importlib.resources import files
from itertools import chain
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.home import front_folder
from infra.keys import is_loopback
from infra.machine import PR_SET_PDEATHSIG, haproxy_binary
from models.serving import Limits
from services.access import ANSWER_MARK, INTERNAL_ERROR, OPEN_PATHS, Keys, RequestError, known
from services.config import ServiceConfig, read_as
from services.failures import place_of
from services.fair_queue import OVERLOADED
from services.http_server import read_body

# The proxy is a process of Ray's: it learns by this variable which configuration it stands before.
CONFIG_VARIABLE = "SERVICE_CONFIG"
SERVE_PATHS = "/-/"
# Of a request, its first line left out.
HEADER_BYTES, HEADER_LINES = 15 << 10, 64
NO_REPLICA = RequestError(503, "no replica is running; ask again in a few seconds", code="engine_unavailable")
SIZES = f"at most {HEADER_LINES} headers are taken, of {HEADER_BYTES} bytes"
TOO_LARGE = RequestError(400, SIZES, code="headers_too_large")
LOST = RequestError(503, "the replica that answered was lost; ask again", code="replica_lost")
# One end for the streams of all APIs: OpenAI's clients look for `error`, Anthropic's for the event's name.
LOST_BODY = json.dumps({"type": "error", **LOST.body()}, separators=(",", ":"))
LOST_FRAMES = f"event: error\ndata: {LOST_BODY}\n\ndata: [DONE]\n\n".encode()
MAX_CONNECTIONS = 4096
# Of the connections that there may be, one address holds half at most: a proxy before us is one address too.
SHARE_OF_ADDRESS = 2
OTHER_FILES = 100  # beyond two of a connection
REWRITE_BYTES = 1024  # of a buffer that holds the headers, for what is added to them
RESTART_S = 0.5
START_TIMEOUT_S, POLL_S = 10.0, 0.05
NOT_HTTP = "the request is not valid HTTP, or ended before its body was complete"
MALFORMED = RequestError(400, NOT_HTTP, code="malformed_http")
SLOW = RequestError(504, "the answer took longer than an hour", code="timeout")
# By the status that HAProxy would answer with: what it says instead.
ANSWERS = {400: MALFORMED, 500: INTERNAL_ERROR, 502: LOST, 503: NO_REPLICA, 504: SLOW}
CONFIG = """\
global
    maxconn {connections}
    nbthread 1
    tune.bufsize {buffer}
    tune.maxrewrite {rewrite}
    tune.http.maxhdr {lines}
    lua-load {guard} {lost} {half}

defaults
    mode http
    timeout http-request 10s
    timeout http-keep-alive 60s
    timeout connect 5s
    timeout client 10m
    timeout server 1h
    retries 0
    option abortonclose
    option http-no-delay
    option http-server-close
    # One connection is one request at a time, so that to bound the one bounds the other.
    option disable-h2-upgrade
{errors}

frontend clients
    bind {host}:{port}
    stick-table type ipv6 size 16k expire 1m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {of_address} }}
    acl full be_conn(replica) ge {requests}
    http-request return status 503 errorfile {overloaded} if full {{ path_beg /v1/ /tokenize /detokenize }}
    http-request set-header X-Forwarded-For %[src]
    default_backend replica

backend replica
    filter lua.guard
    # An error may come before the body was read: what is left of it would be taken for the next request.
    http-response set-header Connection close if {{ status ge 400 }}
    server replica unix@{socket}
"""

log = logging.getLogger(__name__)


def middlewares() -> list[Middleware]:
    """Return what Serve puts around its proxy; called by it, see `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    config = read_as(ServiceConfig, Path(os.environ[CONFIG_VARIABLE]))
    return [Middleware(RequestMiddleware, Keys(config.keys, is_loopback(config.settings.host)), config.serve.limits)]


class RequestMiddleware:
    """ASGI middleware: key and headers, then size and time of a body, and an end for every answer."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**scope, "headers": known(scope["headers"])}
        if scope["type"] != "http":
            await self._app(inner, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            if len(headers.raw) > HEADER_LINES or sum(map(len, chain(*headers.raw))) > HEADER_BYTES:
                raise TOO_LARGE
            if scope["path"] not in OPEN_PATHS:
                self._keys.identify(headers, scope["path"])
            if scope["path"].startswith(SERVE_PATHS):
                raise RequestError(404, "there is no such path")
            body = await read_body(headers, receive, self._limits)
        except RequestError as refusal:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(inner, body, answer.see)
        except Exception as error:  # noqa: BLE001 - the edge
            log.error("the proxy failed on a request: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
        if not answer.started:
            await answer.refusal.response(scope["path"])(scope, receive, send)
        elif answer.is_stream and not answer.ended:
            await send({"type": "http.response.body", "body": LOST_FRAMES})
        # Any other answer that was cut stays so: the server closes the connection on it, which its length gives away.


class _Answer:
    """Passes a replica's answer on, and keeps back what Serve says in its own words."""

    def __init__(self, send: Send) -> None:
        self.started = self.ended = self.is_stream = False
        self.refusal = NO_REPLICA
        self._send = send

    async def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self.started = ANSWER_MARK.decode() in headers
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if message["status"] in (429, 503):
                self.refusal = OVERLOADED
        if self.started:
            self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)


class ReverseProxy:
    """A running HAProxy, started again when it ends by itself; it expects the replica at `socket`. Made by `find`."""

    def __init__(self, binary: Path, config: ServiceConfig, folder: Path) -> None:
        """Write its files into a folder that nobody else can enter."""
        self.socket = folder / "replica.sock"
        self._address = (config.settings.host, config.serve.port)
        self._argv = [str(binary), "-db", "-f", str(_write(config, folder, self.socket))]
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = threading.Thread(target=self._run, name="front", daemon=True)

    @classmethod
    def find(cls, config: ServiceConfig, home: Path) -> "ReverseProxy | None":
        """Return what stands before the replica, None for Serve's own proxy; ValueError if the wanted one can't run."""
        if config.serve.front == "ray" or config.serve.most_replicas > 1 or config.settings.ray_address:
            return None
        if (binary := haproxy_binary()) is not None:
            return cls(binary, config, front_folder(home))
        if config.serve.front == "haproxy":
            raise ValueError('[serve] front is "haproxy", and none runs here; see: redraft doctor')
        log.warning("no HAProxy runs here, so Ray's proxy serves: it bounds no connections, nor how long headers take")
        return None

    def start(self) -> None:
        """Start it and wait until it listens; RuntimeError if it doesn't."""
        self._watch.start()
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._listens():
            if time.monotonic() > until_s:
                self.stop(0.0)
                raise RuntimeError(f"HAProxy did not listen in {START_TIMEOUT_S:g} s; its messages are above")
            time.sleep(POLL_S)

    def stop(self, grace_s: float) -> None:
        """Accept no more connections, wait for the answers that are on their way, and end."""
        self._ending.set()
        self._signal(signal.SIGUSR1)
        self._watch.join(grace_s)
        self._signal(signal.SIGKILL)
        self._watch.join()

    def _run(self) -> None:
        """Keep it running: the kernel ends it with this thread, which so lives as long as it."""
        libc, parent = ctypes.CDLL(None), os.getpid()

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the call
                os._exit(1)

        while not self._ending.is_set():
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - calls one function that is loaded
            )
            code = self._process.wait()
            if not self._ending.wait(RESTART_S):
                log.error("HAProxy ended with %d, and is started again", code)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _listens(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(self._address) == 0


def _write(config: ServiceConfig, folder: Path, socket: Path) -> Path:
    """Write what HAProxy reads, and return its configuration."""
    lines = []
    for status, refusal in ANSWERS.items():
        _write_answer(folder / f"{status}.http", refusal)
        lines.append(f"    errorfile {status} {_quoted(folder / f'{status}.http')}")
    _write_answer(folder / "overloaded.http", OVERLOADED)
    (folder / "lost.events").write_bytes(LOST_FRAMES)
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # HAProxy raises its own to it
    most = MAX_CONNECTIONS if open_files == resource.RLIM_INFINITY else (open_files - OTHER_FILES) // 2
    connections = max(1, min(MAX_CONNECTIONS, most))
    file = folder / "haproxy.cfg"
    file.write_text(
        CONFIG.format(
            connections=connections,
            of_address=max(1, connections // SHARE_OF_ADDRESS),
            buffer=HEADER_BYTES + REWRITE_BYTES,
            rewrite=REWRITE_BYTES,
            lines=HEADER_LINES,
            half=(HEADER_BYTES + REWRITE_BYTES) // 2,
            guard=_quoted(files("services") / "guard.lua"),
            lost=_quoted(folder / "lost.events"),
            errors="\n".join(lines),
            host=config.settings.host,
            port=config.serve.port,
            overloaded=_quoted(folder / "overloaded.http"),
            requests=config.max_requests,
            socket=_quoted(socket),
        )
    )
    return file


def _write_answer(file: Path, refusal: RequestError) -> None:
    response = refusal.response()
    head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    file.write_bytes(b"HTTP/1.1 %d Refused\r\n%b\r\n%b" % (response.status_code, head, bytes(response.body)))


def _quoted(path: object) -> str:
    """Return a path as HAProxy's configuration takes it, whatever is in it."""
    return "".join(f"\\{letter}" if letter in " \\\"'#$" else letter for letter in str(path))
