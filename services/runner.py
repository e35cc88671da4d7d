"""The front, Ray, Serve and its replicas, from start to drained end; started by services/main.py, which cleans up."""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from infra.home import SERVED_NAME, close_to_others, home_secret, ray_folder
from infra.machine import PR_SET_PDEATHSIG, children_named, process_identity
from infra.priority import SERVICE_ENDS_AT
from services.config import ServiceConfig, read_as
from services.reverse_proxy import CONFIG_VARIABLE, ReverseProxy

APP_NAME = "redraft"
NUM_CPUS = 4
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100 << 20
NODE = ("gcs_server", "raylet")  # Ray's own processes, without which nothing is served
LOOK_S = 2.0  # between two looks at these, and at Ray's folder
FLUSH_S = 5.0  # for the last bytes of answers that the replica has given, on their way to slow readers
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
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.reverse_proxy.middlewares",
}
# Whatever the environment says: Serve's own HAProxy, and replicas that listen for it, bind every address.
HELD_OFF = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}

log = logging.getLogger(__name__)


def run(config: ServiceConfig) -> int:
    """Serve until a signal comes; return 0 after a drained end, 1 if the replica never started or Ray is gone.

    Ray tells nobody that its node was lost: a replica that is left answers on, and no other would ever take its place.
    """
    home = config.settings.home
    os.environ.update({name: value for name, value in RAY_VARIABLES.items() if name not in os.environ})
    os.environ |= HELD_OFF
    # By default a token lies in the user's folder, where another program's umask may have left it open.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": home_secret(home, "ray.key").hex()}
    import ray  # reads the variables when it is imported
    from ray import serve

    from services.replica import deployment

    ray_dir, front = ray_folder(home), ReverseProxy.find(config, home)
    ended, is_lost = threading.Event(), False
    threading.Thread(target=_keep_closed, args=(ray_dir,), name="closes Ray's folder", daemon=True).start()
    ray.init(
        address="local",
        num_cpus=max(NUM_CPUS, config.serve.num_replicas + 1),
        include_dashboard=False,
        _node_ip_address=LOOPBACK,  # all of it is on this machine; only the proxy may listen elsewhere
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(ray_dir),
    )
    node = children_named(*NODE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())  # after ray.init, which puts in its own and ends at once
    try:
        if front is not None:
            front.start()
        serve.start(
            proxy_location="HeadOnly" if front is None else "Disabled",
            http_options={"host": config.settings.host, "port": config.serve.port, "request_timeout_s": None},
        )
        deployed = deployment(config, None if front is None else front.socket)
        handle = serve.run(deployed, name=APP_NAME, route_prefix="/", blocking=False)
        by = "Ray's proxy" if front is None else "HAProxy"
        print(f"serving {SERVED_NAME} on {config.url} by {by}", flush=True)
        while not ended.wait(LOOK_S):
            if is_lost := any(process_identity(pid) != identity for pid, identity in node.items()):
                raise RuntimeError("a process of Ray's node has ended, and nobody would replace a lost replica")
        left = sum(handle.broadcast("drain").results(timeout_s=config.serve.drain_s + 10))
        print(f"drained, {left} requests were cut off", flush=True)
    except RuntimeError as error:
        print(f"services.runner: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if front is not None:
            front.stop(config.serve.drain_s if is_lost else FLUSH_S)  # a replica that is left answers on meanwhile
        if not is_lost:  # else both wait for who can't answer
            serve.shutdown()
            ray.shutdown()
    return 0


def _keep_closed(ray_dir: Path) -> None:
    """Close Ray's folder to other users, for good: each process of Ray opens it to everybody as it starts."""
    while True:
        close_to_others(ray_dir)
        time.sleep(LOOK_S)


def main(path: Path) -> int:
    """Run the service of a config that services/main.py has checked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Ray's reaper then ends the rest of the group
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    os.environ[CONFIG_VARIABLE] = str(path.absolute())
    try:
        return run(read_as(ServiceConfig, path))
    except ValueError as error:
        print(f"services.runner: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
