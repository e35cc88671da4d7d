"""What a replica does for the controller that looks after it, on a cluster of ours or of others."""

import json
import logging
import logging.config
import sys
from collections.abc import Callable
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from infra.processes import Child, answers, wait_until
from services.failures import VLLM_LOGGING
from services.replica import application, serve_log_kept
from services.request_middleware import CONFIG_VARIABLE
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
