"""Replicas that come and go with the load, and services in Ray clusters of others."""

import ast
import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import httpx
import pytest

from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.rollout_store import fleets_of
from infra.settings import Settings
from infra.versions import label
from services.replica import application
from services.reverse_proxy import CONFIG_VARIABLE
from services.runner import RAY_VARIABLES
from tests.drills.load import Client, Load
from tests.drills.test_replicas import replicas_of, wait_for_rollout
from tests.services.conftest import make_world
from tests.world import PROMPTS, World, ask

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
    rows, wait_for = partial(replicas_of, world), partial(wait_for_rollout, world)

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


def require_served(world: World, child: Child) -> None:
    """Wait for a service, and require that it answers who has a key, and nobody else."""
    wait_until(lambda: answers(f"{world.url}/readyz"), 300, child, "the replica")
    with world.client() as client:
        assert ask(client, PROMPTS[0]).choices[0].message.content
    assert [httpx.get(f"{world.url}{path}", trust_env=False).status_code for path in ("/-/routes", "/v1/models")] == [
        401,
        401,
    ]
    assert world.status()["draft_version"] == world.versions[0]


def test_a_ray_cluster_of_others_serves_the_application_of_a_file_behind_the_same_middleware(
    make_world: Callable[..., World], tiny_target: Path, tmp_path: Path
) -> None:
    world = make_world(tiny_target)
    told = json.loads(world.config().read_text())
    del told["settings"]  # they are each node's own
    (config := tmp_path / "service.json").write_text(json.dumps(told))
    app = {"name": "redraft", "route_prefix": "/", "args": {"config": str(config)}}
    app["import_path"] = f"{application.__module__}:{application.__name__}"
    http = {"host": "127.0.0.1", "port": world.port}
    (file := tmp_path / "serve.yaml").write_text(json.dumps({"http_options": http, "applications": [app]}))
    argv = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
    with TemporaryDirectory() as short:  # for sockets
        node = RAY_VARIABLES | {CONFIG_VARIABLE: str(config), "REDRAFT_HOME": str(world.home), "RAY_TMPDIR": short}
        with Child.start(argv, node, tmp_path / "log", "Serve") as child:
            require_served(world, child)


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
