"""`python -m services.main --config FILE.json`: one service on this machine, until SIGTERM or SIGINT.

Ray is started for this process alone and ends with it. Exit code 2 means that the configuration is
wrong, 1 that the replica did not start; its log says why.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from infra.processes import require_port_free
from infra.settings import load_settings
from services.config import ServiceConfig, read_config

NUM_CPUS = 4
OBJECT_STORE_BYTES = 100 << 20
# Ray puts sockets about 60 characters below its folder, and a socket's path may have 107.
MAX_RAY_DIR = 40
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    "RAY_DEDUP_LOGS": "0",
}

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.main", description="Serve a target and its draft.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see services/config.py")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings()
        config = read_config(arguments.config)
        config.engine_params()
        require_port_free(config.host, config.port)
    except ValueError as error:
        print(f"services.main: {error}", file=sys.stderr)
        return 2
    settings.prepare_environment()
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return serve_until_signalled(config, settings.home / "ray")


def serve_until_signalled(config: ServiceConfig, ray_dir: Path) -> int:
    """Start Ray and Serve, wait for a signal, drain, and leave nothing running."""
    import ray  # reads the variables set above when it is imported
    from ray import serve

    from services.app import APP_NAME, deployment

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    if len(str(ray_dir)) > MAX_RAY_DIR:
        ray_dir = Path(tempfile.gettempdir()) / f"redraft-{os.getuid()}"
    ray_dir.mkdir(parents=True, exist_ok=True)
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(ray_dir),
        log_to_driver=True,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}},
    )
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.host, "port": config.port, "request_timeout_s": None},
        )
        handle = serve.run(deployment(config), name=APP_NAME, route_prefix="/")
        print(f"serving {config.served_name} on http://{config.host}:{config.port}", flush=True)
        ended.wait()
        print("draining", flush=True)
        left = handle.drain.remote().result(timeout_s=config.drain_s + 10)
        if left:
            log.warning("%d requests were cut off after %g s", left, config.drain_s)
    except RuntimeError as error:
        print(f"services.main: the service did not start: {error}", file=sys.stderr)
        return 1
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
