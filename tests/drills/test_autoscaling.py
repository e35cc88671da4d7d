"""Replicas that come with the load and go with it, which no client notices."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.querylog import QueryLog
from infra.rollout_store import fleets_of
from infra.rollouts import Replica
from infra.versions import label
from tests.drills.load import Client, Load
from tests.services.conftest import make_world
from tests.world import World

__all__ = ["make_world"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MOST = 3
SCALING = {"max_replicas": MOST, "target_ongoing_requests": 2.0, "upscale_delay_s": 0.0, "downscale_delay_s": 4.0}


def test_from_one_replica_to_three_and_back_no_request_fails_and_the_rollout_forgets_who_went(
    make_world: Callable[..., World], tiny_target: Path
) -> None:
    world = make_world(tiny_target, serve={"autoscaling": SCALING, "drain_s": 300.0})
    first, second = world.versions
    log, served = QueryLog(world.querylog), dict[str, set[int | None]]()

    def rows() -> tuple[Replica, ...]:
        return tuple(row for fleet in fleets_of(world.querylog).values() for row in fleet.rows)

    def wait_for(what: str, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 400
        while not holds():
            assert time.monotonic() < until_s, f"{what}: {fleets_of(world.querylog)}"
            time.sleep(0.5)

    def all_answered() -> bool:
        for row in log.rows(1, 10**6):
            served.setdefault(row.server or "", set()).add(row.draft_version)
        return {row.name for row in rows()} <= served.keys()

    with world.start():
        wait_for("one replica with its draft", lambda: any(row.proven for row in rows()))
        [alone] = rows()
        world.registry.promote("draft", second)
        world.wait_for_draft(second)
        with Load(world.url, {}, [Client()]) as always:
            with Load(world.url, {}, [Client()] * 6) as crowd:
                champion = label(world.registry.get("draft", second))
                wait_for("three with the champion", lambda: sum(row.has(champion) for row in rows()) == MOST)
                wait_for("answers of all", all_answered)
            wait_for("one replica", lambda: len(rows()) == 1)
            [left] = rows()
            so_far = always.outcomes["ok"]
            wait_for("further answers", lambda: always.outcomes["ok"] > so_far + 3)
        assert left.has(champion)
    for load in (always, crowd):
        assert load.outcomes.keys() == {"ok"}, load.outcomes
    all_answered()
    assert len(served) == MOST
    assert all(versions == {second} for name, versions in served.items() if name != alone.name), (first, served)
    assert "drained, 0 requests were cut off" in (world.home / "service.log").read_text()
    assert fleets_of(world.querylog) == {}
    log.close()
