"""Replicas that come and go with the load, which no client notices, and a service in a Ray cluster of others."""

import ast
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import pytest

from infra.processes import Child, free_port, wait_until
from infra.querylog import QueryLog
from infra.rollout_store import fleets_of
from infra.rollouts import Replica
from infra.settings import Settings
from infra.versions import label
from tests.drills.load import Client, Load
from tests.services.conftest import make_world
from tests.services.test_replica import require_served
from tests.world import World

__all__ = ["make_world"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

OTHERS = """
import sys

import ray
from ray import serve

ray.init(sys.argv[1], log_to_driver=False)
if "deploy" in sys.argv:
    other = serve.deployment(name="other", ray_actor_options={"num_cpus": 0})(type("Other", (), {}))
    serve.run(other.bind(), name="other", route_prefix="/other")
print({name: app.status.value for name, app in serve.status().applications.items()})
"""
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


def test_a_service_joins_a_ray_cluster_and_ends_there_what_a_killed_one_left_and_then_itself_alone(
    make_world: Callable[..., World], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, address = make_world(tiny_target), f"127.0.0.1:{free_port()}"
    world.settings = world.settings.model_copy(update={"ray_address": address})
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))

    def apps(*deploy: str) -> dict[str, str]:
        """Return how the cluster's applications are by name, asked by somebody else."""
        told = run([sys.executable, "-c", OTHERS, address, *deploy], capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        return ast.literal_eval(told.stdout.splitlines()[-1])

    def refused(**environment: str) -> str:
        """Start another home's service there, and return how it says that it can't be."""
        home, port = tmp_path / "other", free_port()
        told = json.loads(world.config().read_text())
        told |= {"settings": Settings(home=home, ray_address=address).model_dump(mode="json"), "serve": {"port": port}}
        (file := tmp_path / "other.json").write_text(json.dumps(told))
        argv, env = [sys.executable, "-m", "services.main", "--config", str(file)], {**os.environ, **environment}
        ended = run(argv, env={**env, "REDRAFT_HOME": str(home)}, capture_output=True, text=True, check=False)
        assert ended.returncode == 2, ended.stderr
        return ended.stderr.splitlines()[-1]

    ports = ("port", "ray-client-server-port", "dashboard-port", "dashboard-agent-listen-port")
    numbers = (address.rpartition(":")[2], *(str(free_port()) for _ in ports[1:]))
    options = "start --head --block --num-cpus=2 --include-dashboard=false"
    argv = [str(Path(sys.executable).with_name("ray")), *options.split()]
    argv += [f"--{name}={number}" for name, number in zip(ports, numbers, strict=True)]
    with (
        TemporaryDirectory() as short,  # for sockets
        Child.start([*argv, f"--temp-dir={short}"], {}, tmp_path / "log", "Ray") as cluster,
    ):
        wait_until(lambda: "block forever" in (tmp_path / "log").read_text(), 120, cluster, "the cluster")
        assert refused(RAY_AUTH_TOKEN="0" * 64).endswith("and RAY_AUTH_TOKEN its token?")
        with world.start() as killed:
            killed.stop(0)
        with world.start() as service:
            require_served(world, service)
            assert refused().startswith(f"services.runner: Serve runs in the cluster at {address} already")
            (own, ours), (other, theirs) = sorted(apps("deploy").items(), reverse=True)
            assert (bool(re.fullmatch("redraft-[0-9a-f]{12}", own)), ours, other, theirs) == (
                True,
                "RUNNING",
                "other",
                "RUNNING",
            )
            service.stop(120)
        assert "drained, 0 requests were cut off" in (world.home / "service.log").read_text()
        assert apps() == {"other": "RUNNING"}
