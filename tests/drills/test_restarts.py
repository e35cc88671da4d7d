"""How a service starts with a log that can't be used, and where the environment asks for another proxy before it."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from infra.tables import SCHEMA_VERSION
from tests.drills.strangers import Strangers, answer_in, caller, require_error
from tests.world import KEY, OTHER_KEY, PROMPTS, ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize("front", ["auto", "ray"])
def test_f40_whatever_the_environment_says_of_serves_haproxy_what_stands_before_the_service_is_ours(
    strangers: Strangers, front: str
) -> None:
    world = strangers.world
    if world.serve["front"] != front:
        with strangers.stopped():
            world.serve["front"] = front
    with httpx.Client(base_url=world.url, trust_env=False, timeout=60) as stranger, caller(world, KEY) as client:
        assert stranger.get("/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/redraft/status", "/-/routes", "/-/healthz"):
            require_error(stranger.get(path), httpx.codes.UNAUTHORIZED)
        require_error(client.get("nowhere"), httpx.codes.NOT_FOUND)
        require_error(answer_in(client, {"user": "x" * (2 << 20)}), httpx.codes.REQUEST_ENTITY_TOO_LARGE)
        assert answer_in(client, {}).json()["choices"]
    # Serve's replica listens for other nodes on every address, and no setting changes that (SECURITY.md).
    assert len([address for address in strangers.listening() if not address.endswith("127.0.0.1")]) <= 1


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


@pytest.mark.parametrize("spoil", [_torn, _newer])
def test_f36_with_a_log_that_is_torn_or_of_another_schema_serving_goes_on_and_lost_rows_are_counted(
    strangers: Strangers, spoil: Callable[[Path], str]
) -> None:
    world = strangers.world
    with strangers.stopped():
        strangers.bring_back_the_first_log()
        said = spoil(world.querylog)
        spoiled = world.querylog.read_bytes()
    with world.client(OTHER_KEY) as client:
        for prompt in PROMPTS[:4]:
            assert ask(client, prompt).choices[0].finish_reason
        log = world.wait_for("lost rows", lambda status: status["log"]["dropped"] == 4)["log"]
    assert said in log["last_error"]
    assert said in (world.home / "service.log").read_text()
    assert world.querylog.read_bytes() == spoiled
