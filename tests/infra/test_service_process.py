"""A service is found again by the file that it was started with."""

import json
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path

import pytest

from infra import service_process
from infra.home import compiled_folder, config_path, serving
from infra.keys import keys_path, operator_key, read_keys, sha256_of
from infra.processes import free_port
from infra.service_process import client_of, last_status, last_url, require_startable, starting, write_config
from infra.settings import Settings
from infra.status import RunningService
from tests.conftest import ODD_NAME
from tests.infra.collector import QuietHandler, running
from tests.infra.statuses import STATUS

# Compiles one kernel, and answers half a second after that, where the file of settings says.
SLOW_SERVICE = """
import http.server, json, pathlib, sys, time
config, folder = (pathlib.Path(argument) for argument in sys.argv[1:])
folder.mkdir(parents=True)
(folder / "kernel.so").touch()
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("serving target on loopback", flush=True)
http.server.HTTPServer(("127.0.0.1", json.loads(config.read_text())["serve"]["port"]), Handler).serve_forever()
"""


class Handler(QuietHandler):
    def do_GET(self) -> None:
        status, body = self.server.answer
        getattr(self.server, "asked", []).append(self.headers["Authorization"])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def server(settings: Settings) -> Iterator[HTTPServer]:
    """A server that runs where the last service was started."""
    url = write_config({"serve": {"port": 0}}, settings)
    with running(HTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Handler)) as server:
        yield server


def test_the_file_names_the_port_that_was_taken_and_only_its_owner_can_read_it(settings: Settings) -> None:
    url = write_config({"serve": {"port": 0}}, settings)
    written = json.loads(config_path(settings).read_text())
    assert url == last_url(settings) == f"http://127.0.0.1:{written['serve']['port']}"
    assert written["serve"]["port"] > 0
    assert config_path(settings).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_f39_a_home_is_served_once_and_who_comes_second_is_told_where(settings: Settings) -> None:
    told = r"^this home is served already, at http://127\.0\.0\.1:4711$"
    with serving(settings.home, "http://127.0.0.1:4711"):
        with pytest.raises(ValueError, match=told), serving(settings.home, "http://127.0.0.1:4712"):
            pass
        with pytest.raises(ValueError, match=told):
            write_config({"serve": {"port": 0}}, settings)
        assert not config_path(settings).exists()  # the first one is still found
    write_config({"serve": {"port": 0}}, settings)


def test_f42_what_can_not_be_bound_or_joined_is_refused_by_the_name_of_what_to_change(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"^\[serve\] port: port \d+ of 127\.0\.0\.1 is in use"):
            write_config({"serve": {"port": taken.getsockname()[1]}}, Settings(home=tmp_path))
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^REDRAFT_HOST: {host} can't be bound"):
            require_startable(Settings(home=tmp_path, host=host), 0)
    with pytest.raises(ValueError, match=r"^REDRAFT_HOST 0\.0\.0\.0 is reachable from other machines"):
        require_startable(Settings(home=tmp_path, host="0.0.0.0"), 0)
    with pytest.raises(ValueError, match=r"^REDRAFT_RAY_ADDRESS: nothing listens at 127\.0\.0\.1:1: .*refused$"):
        require_startable(Settings(home=tmp_path, ray_address="127.0.0.1:1"), 0)
    require_startable(Settings(home=tmp_path, host="0.0.0.0", api_keys=("a-clients-key",)), 0)
    assert [file.name for file in tmp_path.glob("*.json")] == ["keys.json"]


def test_a_service_without_room_for_its_sockets_names_is_refused_before_it_starts(tmp_path, monkeypatch) -> None:
    (tmp_path / ("t" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 60)))
    with pytest.raises(ValueError, match=r"/ray is \d+ bytes long, wanted 40 for Ray's sockets; shorten TMPDIR$"):
        require_startable(Settings(home=tmp_path / ODD_NAME), 0)


def test_without_a_service_there_is_no_status(settings: Settings) -> None:
    assert last_status(settings) is None
    with pytest.raises(ValueError, match="run: redraft serve"):
        last_url(settings)
    write_config({"serve": {"port": free_port()}}, settings)
    assert last_status(settings) is None


def test_a_service_tells_its_status_once_it_is_ready_and_something_else_on_its_port_is_told(settings, server) -> None:
    server.answer = (200, STATUS.model_dump_json().encode())
    assert last_status(settings) == RunningService(**STATUS.model_dump(), url=last_url(settings))
    for status in (404, 503):
        server.answer = (status, b"")
        assert last_status(settings) is None
    server.answer = (401, b"a key is wanted")
    with pytest.raises(ValueError, match="answers 401: a key is wanted"):
        last_status(settings)


def test_keys_of_the_variable_are_accepted_by_their_hashes(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, api_keys=("the-first-key",))
    for _ in range(2):
        write_config({"serve": {"port": 0}}, settings)
    [key] = read_keys(keys_path(settings))
    assert (key.role, key.sha256, key.accepted) == ("client", sha256_of("the-first-key"), True)
    assert not [file for file in tmp_path.iterdir() if b"the-first-key" in file.read_bytes()]


def test_the_homes_operator_key_goes_to_the_homes_own_service_alone(settings: Settings, server: HTTPServer) -> None:
    server.answer, server.asked = (200, STATUS.model_dump_json().encode()), []
    with client_of(settings) as own, client_of(settings, f"{last_url(settings)}/") as named:
        own.status()
        named.status()
    with client_of(settings, last_url(settings).replace("127.0.0.1", "localhost")) as other:
        other.status()
    assert server.asked == [f"Bearer {operator_key(settings.home)}"] * 2 + [None]


COMPILES = "starting the service: it compiles its models, once on this machine, which takes minutes"


def test_a_start_that_compiles_is_told_before_it_takes_minutes(settings: Settings) -> None:
    assert starting({"engine": {"name": "vllm"}}, settings) == COMPILES
    assert starting({"engine": {"name": "vllm", "enforce_eager": True}}, settings) == "starting the service"
    compiled_folder(settings.cache).mkdir(parents=True)
    assert starting({"engine": {"name": "vllm"}}, settings) == "starting the service"


@pytest.mark.slow
def test_while_a_start_compiles_it_is_told_how_far_it_is(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-c", SLOW_SERVICE, str(config_path(settings)), str(compiled_folder(settings.cache))]
    monkeypatch.setattr(service_process, "service_argv", lambda _: argv)
    monkeypatch.setattr(service_process, "TELL_S", 0.05)
    told: list[str] = []
    config = {"engine": {"name": "vllm"}, "serve": {"port": 0}}
    child, _ = service_process.start_service(config, settings, told.append)
    child.stop()
    assert re.fullmatch(rf"{COMPILES} \(\d+ s, 1 kernel\)", told[-1])
    assert len(told) >= 3


@pytest.mark.slow
def test_in_a_cluster_what_a_killed_service_left_is_not_refused_for_its_port_nor_taken_for_the_one_that_starts(
    tmp_path: Path, server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = (200, b"")
    port = server.server_address[1]
    joined = Settings(home=tmp_path, ray_address=f"127.0.0.1:{port}")
    code = "import time; time.sleep(0.5); print('serving target on loopback', flush=True); time.sleep(60)"
    monkeypatch.setattr(service_process, "service_argv", lambda _: [sys.executable, "-c", code])
    child, url = service_process.start_service({"engine": {"name": "vllm"}, "serve": {"port": port}}, joined)
    child.stop()
    assert url == f"http://127.0.0.1:{port}"
    assert (tmp_path / "logs" / "service.log").read_text() == "serving target on loopback\n"
