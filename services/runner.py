"""Ray, Serve and one replica, from start to drained end; started by services/main.py, which cleans up after it."""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from infra.settings import load_settings
from services.config import ServiceConfig, read_config
from services.edge import CONFIG_VARIABLE

APP_NAME = "redraft"
NUM_CPUS = 4
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100 << 20
# Ray puts sockets about 60 characters below its folder, and a socket's path may have 107.
MAX_RAY_DIR = 40
PR_SET_PDEATHSIG = 1
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Off, as on a desktop: a node that is asked to live on loopback does, instead of looking for another address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # 15 by default: whatever trains beside the replica would come first
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.edge.middlewares",
}

log = logging.getLogger(__name__)


def run(config: ServiceConfig, ray_dir: Path) -> int:
    """Serve until a signal comes; return 0 after a drained end, 1 if the replica never started."""
    os.environ.update({name: value for name, value in RAY_VARIABLES.items() if name not in os.environ})
    import ray  # reads the variables when it is imported
    from ray import serve

    from services.replica import deployment

    if len(str(ray_dir)) > MAX_RAY_DIR:
        ray_dir = Path(tempfile.gettempdir()) / f"redraft-{os.getuid()}"
    ray_dir.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        _node_ip_address=LOOPBACK,  # all of it is on this machine; only the proxy may listen elsewhere
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(ray_dir),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())  # after ray.init, which puts in its own and ends at once
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.host, "port": config.port, "request_timeout_s": None},
        )
        handle = serve.run(deployment(config), name=APP_NAME, route_prefix="/", blocking=False)
        print(f"serving {config.served_name} on http://{config.host}:{config.port}", flush=True)
        ended.wait()
        left = handle.drain.remote().result(timeout_s=config.serve.drain_s + 10)
        print(f"drained, {left} requests were cut off", flush=True)
    except RuntimeError as error:
        print(f"services.runner: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def main(path: Path) -> int:
    """Run the service of a config that services/main.py has checked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Ray's reaper then ends the rest of the group
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    os.environ[CONFIG_VARIABLE] = str(path.absolute())
    return run(read_config(path), load_settings().home / "ray")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
