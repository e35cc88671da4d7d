"""HAProxy, between clients and the replica's own server: it bounds connections, headers and their time.

It answers for a replica that is not there, and ends the stream of one that was lost (guard.lua). It has no page of
statistics and no socket for commands. Once a request's headers are known, each answer of its own has OpenAI's error
shape; headers that are no HTTP, too large or too slow get its built-in 400 or 408, which can't be replaced.
"""

import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from importlib.resources import files
from pathlib import Path

from infra.identity import PR_SET_PDEATHSIG
from infra.installed import haproxy_binary
from infra.serving import front_folder
from services.access import INTERNAL_ERROR, RequestError
from services.config import ServiceConfig
from services.fair_queue import OVERLOADED
from services.request_middleware import HEADER_BYTES, HEADER_LINES, LOST, LOST_FRAMES, NO_REPLICA

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
