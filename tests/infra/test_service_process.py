"""A service is found again by the file that it was started with."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from infra.processes import free_port
from infra.service_process import config_path, last_status, last_url, write_config
from infra.settings import Settings
from infra.status import RunningService
from tests.infra.statuses import STATUS


class Handler(BaseHTTPRequestHandler):
    """Gives the answer that it was given."""

    def do_GET(self) -> None:
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def server(settings: Settings) -> Iterator[HTTPServer]:
    """A server that runs where the last service was started."""
    url = write_config({"host": "127.0.0.1", "port": 0}, settings)
    with HTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_file_names_the_port_that_was_taken_and_only_its_owner_can_read_it(settings: Settings) -> None:
    url = write_config({"host": "127.0.0.1", "port": 0, "api_keys": ["secret"]}, settings)
    written = json.loads(config_path(settings).read_text())
    assert url == last_url(settings) == f"http://127.0.0.1:{written['port']}"
    assert written["port"] > 0
    assert config_path(settings).stat().st_mode & 0o777 == 0o600


def test_a_port_in_use_is_refused_before_anything_starts(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="is in use"):
            write_config({"host": "127.0.0.1", "port": taken.getsockname()[1]}, settings)
    assert not config_path(settings).exists()


def test_without_a_service_there_is_no_status(settings: Settings) -> None:
    assert last_status(settings) is None
    with pytest.raises(ValueError, match="run: redraft serve"):
        last_url(settings)
    write_config({"host": "127.0.0.1", "port": free_port()}, settings)
    assert last_status(settings) is None


def test_a_service_tells_its_status_once_it_is_ready(settings: Settings, server: HTTPServer) -> None:
    server.answer = (200, STATUS.model_dump_json().encode())
    assert last_status(settings) == RunningService(**STATUS.model_dump(), url=last_url(settings))
    for starting in (404, 503):
        server.answer = (starting, b"")
        assert last_status(settings) is None


def test_something_else_on_the_port_is_told(settings: Settings, server: HTTPServer) -> None:
    server.answer = (401, b"a key is wanted")
    with pytest.raises(ValueError, match="answers 401: a key is wanted"):
        last_status(settings)
