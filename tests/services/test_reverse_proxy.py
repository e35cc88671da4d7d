"""HAProxy before a server of a replica, both real, without Ray; test_request_middleware.py asks the whole service."""

import http.client
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.processes import Child, free_port, wait_until
from infra.settings import Settings
from services.config import ServiceConfig
from services.reverse_proxy import LOST_FRAMES, ReverseProxy
from tests.infra.rows import ROOT

NUM_EVENTS = 6000
EVENT = "data: " + "x" * 1000 + "\n\n"
DONE = "data: [DONE]\n\n"
# What a replica is here: a server by Listener, killed with its process.
REPLICA = f"""
import asyncio, sys
from pathlib import Path
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from services.http_server import Listener

async def events(number, gap_s):
    for _ in range(number):
        yield {EVENT!r}
        await asyncio.sleep(gap_s)
    yield {DONE!r}

def streamed(number, gap_s):
    return lambda request: StreamingResponse(events(number, gap_s), media_type="text/event-stream")

async def half(request):
    async def parts():
        yield b"x" * 50
        await asyncio.sleep(60)
    return StreamingResponse(parts(), headers={{"content-length": "100"}})

async def whole(request):
    return JSONResponse(len(await request.body()))

app = Starlette(routes=[
    Route("/v1/caller", lambda request: JSONResponse([request.client.host, sys.argv[2]])),
    Route("/v1/short", streamed(20, 0.05)),
    Route("/v1/large", streamed({NUM_EVENTS}, 0)),
    Route("/v1/long", streamed(1000, 0.02)),
    Route("/v1/half", half),
    Route("/v1/whole", whole, methods=["POST"]),
    Route("/v1/early", lambda request: JSONResponse([], 413), methods=["POST"]),
])

async def main():
    await Listener.start(app, Path(sys.argv[1]), 1.0)
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Scene:
    """A front, and replicas that come and go."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port, self._folder, self._stack, self._number = free_port(), folder, stack, 0
        config = ServiceConfig(target_dir=folder, settings=Settings(home=folder), serve={"port": self.port})
        found = ReverseProxy.find(config, folder)
        assert found is not None
        self.front, self.url = found, f"http://127.0.0.1:{self.port}"
        self.front.start()
        stack.callback(lambda: self.front.stop(1.0))

    def replica(self) -> Child:
        self._number += 1
        argv = [sys.executable, "-c", REPLICA, str(self.front.socket), str(self._number)]
        log = self._folder / f"replica-{self._number}.log"
        child = self._stack.enter_context(Child.start(argv, {"PYTHONPATH": str(ROOT)}, log, "the replica"))
        wait_until(lambda: "listening" in child.tail(), 60, child, "the replica")
        return child

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=60)

    def stream(self, path: str) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("GET", self.url + path, trust_env=False, timeout=60)

    @contextmanager
    def short(self) -> Iterator[None]:
        """Begin a stream, and require all of it after what is done meanwhile."""
        with self.stream("/v1/short") as answer:
            parts = answer.iter_raw()
            first = next(parts)
            yield
            assert (first + b"".join(parts)).decode() == EVENT * 20 + DONE

    def connected(self, source: str = "127.0.0.1", sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=60, source_address=(source, 0))
        made.sendall(sent)
        return made

    def limits(self) -> tuple[int, int]:
        """Return how many connections there may be, and how many of one address."""
        text = (self.front.socket.parent / "haproxy.cfg").read_text()
        found = (re.search(r"^    maxconn (\d+)$", text, re.MULTILINE), re.search(r"sc0_conn_cur gt (\d+) ", text))
        connections, of_address = (int(one[1]) for one in found if one is not None)
        return connections, of_address

    def turns_away(self) -> bool:
        try:
            with self.connected() as one:
                return one.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("a home's"), stack)


@pytest.fixture(scope="module")
def replica(scene: Scene) -> Child:
    """The replica that most tests share."""
    return scene.replica()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


def test_without_a_replica_the_answer_is_503_in_openais_shape(scene: Scene) -> None:
    answer = scene.get("/v1/caller")
    assert error_of(answer) == (503, "engine_unavailable")
    assert answer.headers["retry-after"] == "5"


def test_a_request_passes_and_its_callers_address_is_not_what_it_says(scene: Scene, replica: Child) -> None:
    assert scene.get("/v1/caller", **{"X-Forwarded-For": "192.0.2.1"}).json() == ["127.0.0.1", "1"]


@pytest.mark.slow
def test_a_body_that_turns_out_malformed_is_a_400_in_openais_shape(scene: Scene, replica: Child) -> None:
    begun = b"POST /v1/whole HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    with scene.connected(sent=begun) as client:
        time.sleep(0.5)  # the headers have passed by then
        client.sendall(b"no length\r\n")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        said = httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())
    assert error_of(said) == (400, "malformed_http")
    assert said.headers["content-type"] == "application/json"


def test_after_an_answer_that_came_before_its_body_the_same_client_is_served(scene: Scene, replica: Child) -> None:
    with httpx.Client(base_url=scene.url, trust_env=False, timeout=60) as client:
        for _ in range(10):
            refused = client.post("/v1/early", content=b"x" * (4 << 20))
            assert (refused.status_code, refused.headers["connection"]) == (413, "close")
            assert client.get("/v1/caller").status_code == httpx.codes.OK


@pytest.mark.slow
def test_a_whole_stream_is_left_alone_for_one_who_reads_late_too(scene: Scene, replica: Child) -> None:
    assert scene.get("/v1/short").text == EVENT * 20 + DONE
    with scene.stream("/v1/large") as answer:
        time.sleep(0.5)  # the replica has nothing left to send but what nobody took
        parts = bytearray()
        for part in answer.iter_raw():
            parts += part
            if len(parts) < 1 << 20:
                time.sleep(0.001)
    assert parts.decode() == EVENT * NUM_EVENTS + DONE


@pytest.mark.slow
def test_the_stream_of_a_killed_replica_ends_with_an_error_frame_and_the_next_replica_answers(scene: Scene) -> None:
    killed, received = scene.replica(), bytearray()
    with httpx.Client(trust_env=False, timeout=60) as client:
        with client.stream("GET", f"{scene.url}/v1/long") as answer:
            for part in answer.iter_raw():
                if not received:
                    killed.stop(0.0)  # kill -9
                received += part
        assert received.endswith(LOST_FRAMES)
        assert received.removesuffix(LOST_FRAMES).decode().replace(EVENT, "") == ""
        assert error_of(client.get(f"{scene.url}/v1/caller")) == (503, "engine_unavailable")
        scene.replica()
        assert client.get(f"{scene.url}/v1/caller").status_code == httpx.codes.OK


@pytest.mark.slow
def test_an_answer_that_is_no_stream_is_never_completed_with_something_else(scene: Scene) -> None:
    killed = scene.replica()
    with scene.stream("/v1/half") as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"x" * 50
        killed.stop(0.0)
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)


@pytest.mark.slow
def test_a_replica_takes_the_place_of_one_that_ends_what_it_accepted(scene: Scene) -> None:
    scene.replica()
    with scene.short():
        scene.replica()
        assert scene.get("/v1/caller").json()[1] == str(scene._number)


@pytest.mark.slow
def test_a_killed_haproxy_is_back(scene: Scene) -> None:
    scene.replica()
    process = scene.front._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: scene.front._process is not process and scene.front._listens(), 60, None, "the next one")
    assert scene.get("/v1/caller").status_code == 200


def test_its_files_are_for_nobody_else_and_it_takes_no_commands(scene: Scene) -> None:
    folder = scene.front.socket.parent
    assert folder.stat().st_mode & 0o077 == 0
    assert "socket" not in (folder / "haproxy.cfg").read_text().replace("unix@", "").replace("replica.sock", "")


@pytest.mark.slow
def test_at_its_end_what_runs_is_answered_whole_and_nobody_new_is_let_in(tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.replica()
        ending = threading.Thread(target=scene.front.stop, args=(60.0,))
        with scene.short():
            ending.start()
            wait_until(lambda: not scene.front._listens(), 60, None, "the end of listening")
        ending.join()


def test_without_haproxy_rays_own_serves_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(ray_address: str = "", **serve: object) -> ReverseProxy | None:
        settings = Settings(home=tmp_path, ray_address=ray_address)
        config = ServiceConfig(target_dir=tmp_path, settings=settings, serve=serve)
        return ReverseProxy.find(config, tmp_path)

    assert find(front="ray") is None
    assert find(num_replicas=2) is None
    assert find(autoscaling={"max_replicas": 2}) is None
    assert find(ray_address="head:6379") is None
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "nowhere"))
    assert find(front="auto") is None
    with pytest.raises(ValueError, match="redraft doctor"):
        find(front="haproxy")


def test_an_address_holds_half_of_the_connections(scene: Scene, many_files: None) -> None:
    with ExitStack() as stack:
        for _ in range(scene.limits()[1]):
            stack.enter_context(scene.connected())
        assert scene.turns_away()
    wait_until(lambda: scene.get("/v1/caller").status_code in (200, 503), 60, None, "room again")


@pytest.mark.slow
def test_all_addresses_hold_no_more_than_there_may_be_and_the_next_one_waits(scene: Scene, many_files: None) -> None:
    connections, of_address = scene.limits()
    asked, late = b"GET /v1/caller HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "127.0.0.9"
    with ExitStack() as stack:
        for number in range(connections - 1):
            stack.enter_context(scene.connected(f"127.0.0.{2 + number // of_address}"))
        with scene.connected(late, asked) as last:
            assert last.recv(100).startswith(b"HTTP/1.1 ")
        with scene.connected() as held, scene.connected(late, asked) as waits:
            waits.settimeout(1.0)
            with pytest.raises(TimeoutError):
                waits.recv(100)
            held.close()
            waits.settimeout(60.0)
            assert waits.recv(100).startswith(b"HTTP/1.1 ")


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as this process may ask for: each connection is one here too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"), [(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nHost", 408)]
)
def test_a_connection_can_not_hold_many_requests_by_http_2_and_half_a_request_is_cut_after_its_time(
    scene: Scene, sent: bytes, status: int
) -> None:
    with scene.connected(sent=sent) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 %d " % status)
