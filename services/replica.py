"""The Ray Serve deployment: one service in each replica.

This module is imported by the driver and the controller too, so the engine's libraries come in with the constructor.
Serve builds the ASGI app after it, so that routes can close over the running service.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from infra.home import compiled_folder, open_home
from infra.machine import openmp_preload
from models.engines.vllm import child_environment
from services.config import ServiceConfig, read_as
from services.failures import VLLM_LOGGING

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# The engine has processes of its own; Serve only keeps books of this.
REPLICA_CPUS = 1
CLOSE_S = 10.0  # after the last answer: what was recorded is written, and the engine ends
# How long a thread, as one that renders a long chat, keeps the event loop from the interpreter's lock; otherwise 5 ms.
SWITCH_S = 0.0005
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0


@serve.ingress()
class Replica:
    """What Serve starts, asks for its health, and drains."""

    async def __init__(self, config_json: str, socket: Path | None) -> None:  # type: ignore[misc]  # Ray awaits it
        sys.setswitchinterval(SWITCH_S)
        config = ServiceConfig.model_validate_json(config_json)
        # Of this node, which may not be the one that the service began on.
        config.settings.prepare_environment()
        open_home(config.settings)
        os.environ |= child_environment(config.engine_params())
        os.environ["VLLM_CACHE_ROOT"] = str(compiled_folder(config.settings.cache))
        with serve_log_kept():
            gc.disable()  # of what is imported nothing is garbage, and to look for it takes a quarter of the time
            from services.service import Service

            gc.freeze()
            gc.enable()
            # Without a handler only warnings are shown.
            logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
            for name in ("services", "models.engines"):
                logging.getLogger(name).setLevel(logging.INFO)
            several = config.serve.most_replicas > 1
            replica = serve.get_replica_context().replica_id.unique_id if several else ""
            self._service = await Service.start(config, replica)
            self._socket = socket

    def __serve_build_asgi_app__(self) -> "ASGIApp":
        from services.app import build_app
        from services.http_server import listening

        app = build_app(self._service)
        return app if self._socket is None else listening(app, self._socket, self._service.config.serve.drain_s)

    async def check_health(self) -> None:
        """Raise a plain RuntimeError, so that Serve replaces the replica."""
        await self._service.engine.health()
        self._service.require_no_replacement()

    async def drain(self) -> int:
        """See `Service.drain`; called through the handle before the app is taken down."""
        return await self._service.drain()


@contextmanager
def serve_log_kept() -> Iterator[None]:
    """Give Serve's log its file back at the end, which vLLM closes with every handler as it configures logging.

    A controller that takes over a running replica asks it where it logs to, and replaces one that can't tell.
    """
    handlers = [handler for handler in logging.getLogger("ray.serve").handlers if isinstance(handler, MemoryHandler)]
    files = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            handler.setTarget(file)


def deployment(config: ServiceConfig, socket: Path | None) -> serve.Application:
    """Return the Serve application of one configuration; without a socket Serve's own proxy stands before it."""
    environment = {**openmp_preload(), **VLLM_LOGGING}  # what a process must be started with
    deployed = serve.deployment(
        name="replica",
        **_num_replicas(config),
        # What runs and what waits is decided in the replica, by key (services/fair_queue.py); all of it must get there.
        max_ongoing_requests=config.max_requests,
        max_queued_requests=config.serve.limits.max_queued_requests,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.serve.drain_s + CLOSE_S,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},
        ray_actor_options={
            "num_cpus": REPLICA_CPUS,
            "num_gpus": config.num_gpus,
            "runtime_env": {"env_vars": environment},
        },
    )
    # Settings that the file does not have are each node's own.
    return deployed(Replica).bind(config.model_dump_json(exclude_unset=True), socket)


def _num_replicas(config: ServiceConfig) -> dict[str, Any]:
    """Return what Serve is told of their number."""
    scaling = config.serve.autoscaling
    if scaling.max_replicas == 1:
        return {"num_replicas": config.serve.num_replicas}
    told = {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "target_ongoing_requests": scaling.target_ongoing_requests or config.engine_params().max_num_seqs / 2,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
    }
    return {"autoscaling_config": told}


def application(args: dict[str, str]) -> serve.Application:
    """Return the application of the file that argument `config` names, for a Ray cluster of others, such as KubeRay's.

    ValueError if keys of clients come with the environment: each node has to know them from its home.
    """
    config = read_as(ServiceConfig, Path(args["config"]))
    if config.settings.api_keys:
        raise ValueError("REDRAFT_API_KEYS is set, wanted clients' keys in each node's home, by keys.json")
    return deployment(config, None)
