"""How a service starts with a log that can't be used, and where the environment asks for another proxy before it."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from infra.tables import SCHEMA_VERSION
from tests.drills.scene import require_end_without, runner_of
from tests.drills.strangers import Strangers, answer_in, caller, require_error
from tests.world import KEY, OTHER_KEY, PROMPTS, ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def _torn(log: Path) -> str:
    with closing(sqlite3.connect(log)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else the first page may stand in the write-ahead log, too
    with log.open("r+b") as file:
        file.write(os.urandom(4096))
    return "is torn"


def _newer(log: Path) -> str:
    with closing(sqlite3.connect(log)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    return f"has schema version {SCHEMA_VERSION + 1}"


Start = tuple[str, Callable[[Path], str] | None]
FIRST, BY_RAY, NEWER = ("auto", None), ("ray", _torn), ("auto", _newer)


@pytest.fixture(scope="module")
def spoiled(strangers: Strangers, request: pytest.FixtureRequest) -> tuple[str, bytes]:
    """What is said of the log of a service that was started with a proxy and something wrong with it, and its bytes."""
    front, spoil = request.param
    if spoil is None:
        return "", b""
    with strangers.stopped():
        strangers.world.serve["front"] = front
        strangers.bring_back_the_first_log()
        return spoil(strangers.world.querylog), strangers.world.querylog.read_bytes()


@pytest.mark.parametrize("spoiled", [FIRST, BY_RAY], indirect=True, ids=["auto", "ray"])
def test_f40_whatever_the_environment_says_of_serves_haproxy_what_stands_before_the_service_is_ours(
    strangers: Strangers, spoiled: tuple[str, bytes]
) -> None:
    url = strangers.world.url
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as stranger, caller(strangers.world, KEY) as client:
        assert stranger.get("/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/redraft/status", "/-/routes", "/-/healthz"):
            require_error(stranger.get(path), httpx.codes.UNAUTHORIZED)
        require_error(client.get("nowhere"), httpx.codes.NOT_FOUND)
        require_error(answer_in(client, {"user": "x" * (2 << 20)}), httpx.codes.REQUEST_ENTITY_TOO_LARGE)
        client.headers["X-Redraft-Log"] = "none"  # the drill of f36 counts rows
        assert answer_in(client, {}).json()["choices"]
    # Serve's replica listens for other nodes on every address, and no setting changes that (SECURITY.md).
    assert len([address for address in strangers.listening() if not address.endswith("127.0.0.1")]) <= 1


@pytest.mark.parametrize("spoiled", [BY_RAY, NEWER], indirect=True, ids=["torn", "newer"])
def test_f36_with_a_log_that_is_torn_or_of_another_schema_serving_goes_on_and_lost_rows_are_counted(
    strangers: Strangers, spoiled: tuple[str, bytes]
) -> None:
    world, (said, content) = strangers.world, spoiled
    with world.client(OTHER_KEY) as client:
        for prompt in PROMPTS[:4]:
            assert ask(client, prompt).choices[0].finish_reason
        log = world.wait_for("lost rows", lambda status: status["log"]["dropped"] == 4)["log"]
    assert said in log["last_error"]
    assert said in (world.home / "service.log").read_text()
    assert world.querylog.read_bytes() == content


def test_a_service_that_lost_its_runner_ends_and_leaves_nothing(strangers: Strangers) -> None:
    require_end_without(runner_of(strangers.service), strangers.service)
