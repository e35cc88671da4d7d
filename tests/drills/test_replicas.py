"""Replicas of one service, of which one tries a draft before the others."""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from infra.querylog import QueryLog
from infra.rollout_store import fleets_of, note_tested
from infra.rollouts import Replica
from infra.versions import label
from models.types import RolloutParams
from tests.services.conftest import make_world
from tests.world import PROMPTS, World, ask

__all__ = ["make_world"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def replicas_of(world: World) -> tuple[Replica, ...]:
    return tuple(row for fleet in fleets_of(world.querylog).values() for row in fleet.rows)


def wait_for_rollout(world: World, what: str, holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 400
    while not holds():
        assert time.monotonic() < until_s, f"{what}: {fleets_of(world.querylog)}"
        time.sleep(0.2)


def test_of_two_replicas_the_second_never_loads_a_draft_that_does_worse_on_the_canary(
    make_world: Callable[..., World], tiny_target: Path
) -> None:
    waves = {"waves": [1.0], "pause_s": 0.0, "test_s": 3600.0}
    world = make_world(tiny_target, serve={"num_replicas": 2, "rollout": waves})
    first, worse = world.versions
    log, rows, wait_for = QueryLog(world.querylog), partial(replicas_of, world), partial(wait_for_rollout, world)

    def served() -> dict[str, set[int | None]]:
        """Ask until both replicas answered, and return which drafts each answered with since the start."""
        with world.client() as client:
            for prompt in PROMPTS:
                assert ask(client, prompt).choices[0].finish_reason
        found: dict[str, set[int | None]] = {row.name: set() for row in rows()}
        for row in log.rows(1, 10**6, "metadata"):
            found[row.server or ""].add(row.draft_version)
        return found

    def serve(number: int) -> bool:
        return len(rows()) == 2 and all(row.has(label(world.registry.get("draft", number))) for row in rows())

    def swaps() -> dict[str, int]:
        """Ask until both replicas answered, and return how many drafts each loaded since its start."""
        found: dict[str, int] = {}
        while len(found) < 2:
            status = world.status()
            found[status["replica"]] = status["swaps"]
        return found

    with world.start():
        wait_for("both replicas with the champion", lambda: serve(first))
        wait_for("answers of both", lambda: set(map(frozenset, served().values())) == {frozenset({first})})
        world.registry.promote("draft", worse)
        bad = label(world.registry.get("draft", worse))
        wait_for("the canary with the new champion", lambda: any(row.has(bad) for row in rows()))
        canary, other = sorted(rows(), key=lambda row: row.wave)
        wait_for("answers of the canary", lambda: worse in served()[canary.name])
        world.registry.revert("draft", worse, "worse on the same requests")  # as the post-promotion test does
        wait_for("both with the first draft again", lambda: serve(first))
        assert served() == {canary.name: {first, worse}, other.name: {first}}
        assert swaps() == {canary.name: 2, other.name: 0}

        lying = world.register(2, golden_tau="9.0")
        world.registry.promote("draft", lying)
        wait_for("a quarantine", lambda: world.registry.get("draft", lying).quarantined != "")
        assert world.registry.get("draft", lying).quarantined.startswith("failed where the last good draft passed")
        wait_for("both with the first draft again", lambda: serve(first))
        assert swaps() == {canary.name: 3, other.name: 0}

        good = world.register(3)
        world.registry.promote("draft", good)
        version = world.registry.get("draft", good)
        wait_for("the canary with a good draft", lambda: any(row.has(label(version)) for row in rows()))
        assert not serve(good)
        note_tested(world.querylog, version, RolloutParams.model_validate(waves))
        wait_for("both replicas with it", lambda: serve(good))
        metrics = httpx.get(f"{world.url}/metrics", headers=world.operator, timeout=60, trust_env=False).text
        assert re.search(rf'redraft_draft_version{{replica="[^"]+/[^"]+"}} {good}\.0', metrics)
    assert "drained, 0 requests were cut off" in (world.home / "service.log").read_text()
    assert fleets_of(world.querylog) == {}
    log.close()
