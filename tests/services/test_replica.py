"""What a replica does for the controller that looks after it, on a cluster of ours or of others."""

import json
import logging
import logging.config
import re
import sys
import time
from collections.abc import Callable
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from infra.processes import Child, answers, wait_until
from infra.querylog import QueryLog
from infra.rollout_store import fleets_of, note_tested
from infra.rollouts import Replica
from infra.settings import Settings
from infra.versions import label
from models.serving import Serve
from models.types import RolloutParams
from services.config import ServiceConfig
from services.failures import VLLM_LOGGING
from services.replica import application, deployment, serve_log_kept
from services.reverse_proxy import CONFIG_VARIABLE
from services.runner import RAY_VARIABLES
from tests.world import PROMPTS, World, ask


def test_serves_log_keeps_its_file_while_vllm_configures_logging(tmp_path: Path) -> None:
    file = RotatingFileHandler(tmp_path / "replica.log")
    handler = MemoryHandler(capacity=1, target=file)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    try:
        with serve_log_kept(), open(VLLM_LOGGING["VLLM_LOGGING_CONFIG_PATH"]) as config:
            logging.config.dictConfig(json.load(config))
            assert handler.target is None
        logger.warning("taken over")
    finally:
        logger.removeHandler(handler)
        handler.close()
        file.close()
    assert (tmp_path / "replica.log").read_text() == "taken over\n"


@pytest.mark.parametrize(("said", "target"), [({}, 8.0), ({"target_ongoing_requests": 3.0}, 3.0)])
def test_serve_scales_by_the_recipes_table_and_by_half_of_a_full_batch_if_that_says_no_target(
    tmp_path: Path, said: dict[str, Any], target: float
) -> None:
    scaling = {"min_replicas": 2, "max_replicas": 5, "upscale_delay_s": 7.0, "downscale_delay_s": 9.0}
    engine, settings = {"name": "vllm", "max_num_seqs": 16}, Settings(home=tmp_path)
    serve = Serve.model_validate({"autoscaling": {**scaling, **said}})
    config = ServiceConfig(target_dir=tmp_path, engine=engine, settings=settings, serve=serve)
    told = deployment(config, None)._bound_deployment._deployment_config.autoscaling_config
    assert told is not None
    wanted = {**scaling, "target_ongoing_requests": target}
    assert told.model_dump(include=wanted.keys()) == wanted


@pytest.mark.engine
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


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_of_two_replicas_the_second_never_loads_a_draft_that_does_worse_on_the_canary(
    make_world: Callable[..., World], tiny_target: Path
) -> None:
    waves = {"waves": [1.0], "pause_s": 0.0, "test_s": 3600.0}
    world = make_world(tiny_target, serve={"num_replicas": 2, "rollout": waves})
    first, worse = world.versions
    log = QueryLog(world.querylog)

    def rows() -> tuple[Replica, ...]:
        return tuple(row for fleet in fleets_of(world.querylog).values() for row in fleet.rows)

    def served() -> dict[str, set[int | None]]:
        """Ask until both replicas answered, and return which drafts each answered with since the start."""
        with world.client() as client:
            for prompt in PROMPTS:
                assert ask(client, prompt).choices[0].finish_reason
        found: dict[str, set[int | None]] = {row.name: set() for row in rows()}
        for row in log.rows(1, 10**6, "metadata"):
            found[row.server or ""].add(row.draft_version)
        return found

    def wait_for(what: str, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 300
        while not holds():
            assert time.monotonic() < until_s, f"{what}: {fleets_of(world.querylog)}"
            time.sleep(0.2)

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
