"""HTTP servers of a few lines, and one that takes events as Prefect's does, and keeps them."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import TypeVar

S = TypeVar("S", bound=HTTPServer)


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.got: list[dict] = []
        self.status, self.delay_s = 204, 0.0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api"


class Handler(QuietHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.delay_s)
        self.server.got += [{**event, "path": self.path} for event in json.loads(body)]
        self.send_response(self.server.status)
        self.end_headers()


@contextmanager
def running(server: S) -> Iterator[S]:
    """Let a server answer in the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def collecting() -> AbstractContextManager[Collector]:
    return running(Collector())
