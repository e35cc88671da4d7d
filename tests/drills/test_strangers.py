"""What one client, or a log that can't be used, may not do to the others: forms that explode, a flood, torn files."""

import os
import shutil
import sqlite3
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from infra.logfile import COPIES, SCHEMA_VERSION
from infra.processes import Child, wait_until
from tests.drills.load import Asker, Load, quiet_answers
from tests.infra.homes.old import old_home
from tests.world import KEY, MODEL, OTHER_KEY, PROMPTS, World, ask, make_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
COMPILE_S = 2.0
# What a child of a compiler may keep, and what processes that answered a few hundred requests grow by.
MOST_GROWTH_BYTES = 64 << 20
FLOODERS = 6
TRIES = 30
MANY_TRIES = 200
MOST_HELD_BYTES = 50 << 20
# The aim is 2, and 1.5 was measured; the clients run on the same noisy cores.
MOST_SLOWED = 3.0

Form = dict[str, Any]

BOTH = {"type": "string", "pattern": "((a|b)*c{1,99}){1,99}"}
MANY = {"type": "array", "minItems": 900, "maxItems": 900, "items": {"type": "string", "pattern": "(a|b){900}"}}


def _schema(schema: object) -> Form:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}}


def _nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


EXPLODING: dict[str, Form] = {
    "bytes": {"structured_outputs": {"choice": ["x" * 100_000]}},
    "nesting": _schema(_nested(200)),
    "alternation": _schema({"type": "object", "properties": {f"k{n}": BOTH for n in range(200)}}),
    "repetition": _schema({"type": "array", "minItems": 900, "maxItems": 900, "items": MANY}),
    "itself": {"structured_outputs": {"grammar": "root ::= root"}},
    "reference to itself": _schema({"$ref": "#"}),
}


class Strangers:
    """A service, and what its processes hold."""

    def __init__(self, world: World) -> None:
        self.world, self._service = world, world.start()

    def memory_bytes(self) -> int:
        """Return the resident memory of the service's processes, shared pages counted once for each."""
        runner = psutil.Process(self._service.pid)
        return sum(process.memory_info().rss for process in [runner, *runner.children(recursive=True)])

    def listening(self) -> list[str]:
        """Return the addresses that the service's processes listen on, one for each port."""
        runner = psutil.Process(self._service.pid)
        family = {process.pid for process in runner.children(recursive=True)}
        found = psutil.net_connections(kind="inet")
        ours = {c.laddr for c in found if c.status == psutil.CONN_LISTEN and c.pid in family}
        return [address.ip for address in ours]

    def load(self) -> Load:
        return Load(self.world.url, quiet_answers(self.world), [Asker()] * 2)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """End the service, and start it again at the end."""
        self.stop()
        yield
        self._service = self.world.start()

    def stop(self) -> None:
        self._service.stop(grace_s=60)


@pytest.fixture(scope="module")
def strangers(
    tiny_target: Path, engine: Any, loop: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Strangers]:
    home = tmp_path_factory.mktemp("strangers")
    make_target(tiny_target, home / "target", engine, loop)
    strangers = Strangers(World(home, home / "target", serve={"structured": {"enabled": True, "timeout_s": COMPILE_S}}))
    try:
        yield strangers
    finally:
        strangers.stop()


def caller(world: World, key: str) -> httpx.Client:
    """Return a client that is made before its requests are timed."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{world.url}/v1/", headers=headers, timeout=60, trust_env=False)


def answer_in(client: httpx.Client, form: Form) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8, "temperature": 0}
    return client.post("chat/completions", json=body | form)


def test_f26_a_form_that_explodes_is_refused_in_its_time_and_nobody_else_notices(strangers: Strangers) -> None:
    small = _schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    with caller(strangers.world, KEY) as client:
        assert answer_in(client, small).status_code == httpx.codes.OK
        with strangers.load() as load:
            before = strangers.memory_bytes()
            for name, form in EXPLODING.items():
                began_s = time.monotonic()
                answer = answer_in(client, form)
                took_s = time.monotonic() - began_s
                assert answer.status_code == httpx.codes.BAD_REQUEST, (name, answer.text)
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, name
                assert took_s < COMPILE_S + 2.0, (name, took_s)
            grown = strangers.memory_bytes() - before
        assert load.ended_well(), load.outcomes
        assert grown < MOST_GROWTH_BYTES, grown
        assert answer_in(client, small).status_code == httpx.codes.OK


def _first_token_s(client: httpx.Client, prompt: str) -> float:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "stream": True}
    began_s = time.monotonic()
    with client.stream("POST", "chat/completions", json=body) as answer:
        assert answer.status_code == httpx.codes.OK
        parts = answer.iter_bytes()
        next(parts)
        took_s = time.monotonic() - began_s
        for _ in parts:  # to its end, so that the connection serves the next one too
            pass
    return took_s


@contextmanager
def _flood(world: World) -> Iterator[Callable[[], int]]:
    """Ask with one key, without a pause, for several answers to several long prompts at once."""
    ended, statuses = threading.Event(), list[int]()
    prompts = [" ".join(f"{word} of {number}" for word in range(30)) for number in range(4)]
    body = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 64, "temperature": 1.0}

    def work() -> None:
        with caller(world, world.flooder) as client:
            while not ended.is_set():
                statuses.append(client.post("completions", json=body).status_code)

    clients = [threading.Thread(target=work) for _ in range(FLOODERS)]
    for client in clients:
        client.start()
    try:
        yield lambda: statuses.count(httpx.codes.OK)
    finally:
        ended.set()
        for client in clients:
            client.join()
    assert {*statuses} <= {httpx.codes.OK, httpx.codes.TOO_MANY_REQUESTS}, statuses


def test_f28_beside_a_key_that_floods_anothers_first_token_hardly_waits(strangers: Strangers) -> None:
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} ({n})" for n in range(2 * TRIES)]
    with caller(strangers.world, OTHER_KEY) as client:
        _first_token_s(client, PROMPTS[0])
        alone_s = statistics.median(_first_token_s(client, prompt) for prompt in prompts[:TRIES])
        with _flood(strangers.world) as answered:
            while answered() < FLOODERS:
                time.sleep(0.05)
            beside_s = statistics.median(_first_token_s(client, prompt) for prompt in prompts[TRIES:])
    print(f"first token after {alone_s:.3f} s alone, {beside_s / alone_s:.2f} times that beside a flood")
    assert beside_s <= MOST_SLOWED * alone_s


@contextmanager
def _header_flood(world: World) -> Iterator[None]:
    """Hold connections without a key that never finish their headers, and send headers by the megabyte."""
    argv = ["nice", "-n", "19", sys.executable, "-m", "tests.drills.headers", str(world.port)]
    with Child.start(argv, {"PYTHONPATH": str(ROOT)}, world.home / "headers.log", "the flood") as flood:
        wait_until(lambda: "held" in flood.tail(), 60, flood, "half-open connections")
        yield
        wait_until(lambda: "sent" in flood.tail(), 300, flood, "the flood to have sent all of it")


def test_f27_beside_half_open_connections_and_headers_by_the_megabyte_clients_with_keys_hardly_wait(
    strangers: Strangers,
) -> None:
    world = strangers.world
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} ({n})" for n in range(2 * MANY_TRIES)]
    with caller(world, KEY) as client:
        for prompt in prompts[:8]:
            _first_token_s(client, prompt)
        alone = [_first_token_s(client, prompt) for prompt in prompts[:MANY_TRIES]]
        before = strangers.memory_bytes()
        with _header_flood(world):
            beside = [_first_token_s(client, prompt) for prompt in prompts[MANY_TRIES:]]
            grown = strangers.memory_bytes() - before
    alone_s, beside_s = (statistics.quantiles(times, n=100)[98] for times in (alone, beside))
    print(f"p99 of a first token {alone_s:.3f} s alone, {beside_s / alone_s:.2f} times that; {grown >> 20} MiB more")
    assert beside_s <= MOST_SLOWED * alone_s
    assert grown < MOST_HELD_BYTES, grown
    require_error(httpx.get(f"{world.url}/v1/models", trust_env=False), httpx.codes.UNAUTHORIZED)


def require_error(answer: httpx.Response, status: int) -> None:
    """Check that an answer is an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def _torn(log: Path) -> str:
    with log.open("r+b") as file:
        file.write(os.urandom(4096))
    return "is torn"


def _newer(log: Path) -> str:
    with closing(sqlite3.connect(log)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    return "upgrade redraft"


@pytest.mark.parametrize("spoil", [_torn, _newer])
def test_f36_with_a_log_that_is_torn_or_newer_serving_goes_on_and_lost_rows_are_counted(
    strangers: Strangers, spoil: Callable[[Path], str], tmp_path: Path
) -> None:
    world = strangers.world
    with strangers.stopped():
        shutil.move(world.querylog.parent, tmp_path / "log")
        shutil.copytree(tmp_path / "log", world.querylog.parent)
        said = spoil(world.querylog)
        spoiled = world.querylog.read_bytes()
    with world.client(OTHER_KEY) as client:
        for prompt in PROMPTS[:4]:
            assert ask(client, prompt).choices[0].finish_reason
        log = world.wait_for("lost rows", lambda status: status["log"]["dropped"] == 4)["log"]
    assert said in log["last_error"]
    assert said in (world.home / "service.log").read_text()
    assert world.querylog.read_bytes() == spoiled
    with strangers.stopped():
        shutil.rmtree(world.querylog.parent)
        shutil.move(tmp_path / "log", world.querylog.parent)


def test_f36_a_log_of_an_older_schema_is_kept_as_it_was_and_brought_up_to_date(
    strangers: Strangers, tmp_path: Path
) -> None:
    world, old = strangers.world, old_home(tmp_path).querylog
    with closing(sqlite3.connect(old)) as db:
        version, rows = (
            db.execute("PRAGMA user_version").fetchone()[0],
            db.execute("SELECT id FROM rows ORDER BY seq").fetchall(),
        )
    assert 0 < version < SCHEMA_VERSION
    with strangers.stopped():
        shutil.rmtree(world.querylog.parent)
        world.querylog.parent.mkdir()
        shutil.copy(old, world.querylog)
    with world.client(OTHER_KEY) as client:
        ask(client, PROMPTS[0], extra_headers={"X-Redraft-Domain": "younger"})
    [row] = world.wait_for_rows("younger", 1)
    with closing(sqlite3.connect(world.querylog)) as db:
        assert db.execute("SELECT id FROM rows WHERE seq < ? ORDER BY seq", (row.seq,)).fetchall() == rows
    kept = world.querylog.parent / COPIES / f"{world.querylog.stem}-schema-{version}.db"
    with closing(sqlite3.connect(kept)) as db:
        assert db.execute("SELECT id FROM rows ORDER BY seq").fetchall() == rows
    assert world.status()["log"]["dropped"] == 0


@pytest.mark.parametrize("front", ["auto", "ray"])
def test_f40_whatever_the_environment_says_of_serves_haproxy_what_stands_before_the_service_is_ours(
    strangers: Strangers, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = strangers.world
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with strangers.stopped():
        world.serve["front"] = front
    with httpx.Client(base_url=world.url, trust_env=False, timeout=30) as stranger, caller(world, KEY) as client:
        assert stranger.get("/healthz").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/redraft/status", "/-/routes", "/-/healthz"):
            require_error(stranger.get(path), httpx.codes.UNAUTHORIZED)
        require_error(client.get("nowhere"), httpx.codes.NOT_FOUND)
        require_error(answer_in(client, {"user": "x" * (2 << 20)}), httpx.codes.REQUEST_ENTITY_TOO_LARGE)
        assert answer_in(client, {}).json()["choices"]
    # Serve's replica listens for other nodes on every address, and no setting changes that (SECURITY.md).
    assert len([address for address in strangers.listening() if not address.endswith("127.0.0.1")]) <= 1
