"""Ray, Serve and one replica, from start to drained end; started by services/main.py, which cleans up after it."""

import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from infra.memory import SERVICE_ENDS_AT
from infra.secret import home_secret
from infra.service_process import ray_folder
from infra.settings import load_settings
from services.config import ServiceConfig, read_config
from services.edge import CONFIG_VARIABLE

APP_NAME = "redraft"
NUM_CPUS = 4
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100 << 20
PR_SET_PDEATHSIG = 1
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Off, as on a desktop: a node that is asked to live on loopback does, instead of looking for another address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Whatever wakes up on one core of two stalls the engine at its next barrier; an idle Ray costs it 5 to 10%.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "2",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_raylet_report_resources_period_milliseconds": "2000",
    "RAY_worker_niceness": "0",  # 15 by default: whatever trains beside the replica would come first
    # What trains ends itself before this share is used, see there; 1000 would offer the replica to the kernel first.
    "RAY_memory_usage_threshold": str(SERVICE_ENDS_AT),
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.edge.middlewares",
}

log = logging.getLogger(__name__)


def run(config: ServiceConfig, home: Path) -> int:
    """Serve until a signal comes; return 0 after a drained end, 1 if the replica never started.

    Raises:
        ValueError: see `ray_folder`.
    """
    os.environ.update({name: value for name, value in RAY_VARIABLES.items() if name not in os.environ})
    # By default a token lies in the user's folder, where another program's umask may have left it open.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": home_secret(home, "ray.key").hex()}
    import ray  # reads the variables when it is imported
    from ray import serve

    from services.replica import deployment

    ray_dir = ray_folder(home)
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
    try:
        return run(read_config(path), load_settings().home)
    except ValueError as error:
        print(f"services.runner: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
