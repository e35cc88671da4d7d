"""The front, Ray, Serve and its replicas, from start to drained end; started by services/main.py, which cleans up."""

import ctypes
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from infra.home import SERVING, close_to_others, home_secret, ray_folder
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
    home, cluster = config.settings.home, config.settings.ray_address
    # What is no variable of Serve's is of a node, and a cluster's nodes are started by others.
    told = (name for name in RAY_VARIABLES if name.startswith("RAY_SERVE_") or not cluster)
    os.environ |= {name: os.environ.get(name, RAY_VARIABLES[name]) for name in told} | HELD_OFF
    if cluster:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # 20 wait a quarter of an hour for what is no cluster
    else:
        # By default a token lies in the user's folder, where another program's umask may have left it open.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": home_secret(home, "ray.key").hex()}
    import ray  # reads the variables when it is imported
    from ray import serve
    from ray.exceptions import RayError

    from services.replica import deployment

    front, ended, is_lost, app = ReverseProxy.find(config, home), threading.Event(), False, APP_NAME
    if cluster:
        app = f"{APP_NAME}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"
        _join(cluster, app)
    else:
        _start_ray(ray_folder(home), config.serve.most_replicas)
    node = children_named(*NODE)  # of a cluster none; Ray ends this process a minute after its head was lost
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
        handle = serve.run(deployed, name=app, route_prefix="/", blocking=False)
        by = "Ray's proxy" if front is None else "HAProxy"
        print(f"{SERVING} on {config.url} by {by}", flush=True)
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
        if not is_lost:  # else all wait for who can't answer
            with suppress(RayError):  # a cluster's head may be gone, and all with it
                if serve.status().applications.keys() - {app}:  # of others
                    serve.delete(app)
                else:
                    serve.shutdown()
            ray.shutdown()
    return 0


def _start_ray(folder: Path, num_replicas: int) -> None:
    """Start Ray on this machine, for this process alone."""
    import ray

    threading.Thread(target=_keep_closed, args=(folder,), name="closes Ray's folder", daemon=True).start()
    ray.init(
        address="local",
        num_cpus=max(NUM_CPUS, num_replicas + 1),
        include_dashboard=False,
        _node_ip_address=LOOPBACK,  # all of it is on this machine; only the proxy may listen elsewhere
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    )


def _join(address: str, app: str) -> None:
    """Join a running cluster, and end what a killed service of this home left there.

    ValueError if it lets nobody in, or Serve runs there for others, whose proxies lack what ours have.
    """
    import ray
    from ray import serve
    from ray.exceptions import RayError

    ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}
    try:
        ray.init(address, runtime_env={"env_vars": {**ours, CONFIG_VARIABLE: os.environ[CONFIG_VARIABLE]}})
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ValueError(
            f"{str(error).splitlines()[0]}; is it of this version of Ray, and RAY_AUTH_TOKEN its token?"
        ) from error
    found = serve.status()
    if found.applications.keys() == {app}:
        serve.shutdown()
        return
    if app in found.applications:
        serve.delete(app)
    if found.applications or found.proxies:
        raise ValueError(
            f"Serve runs in the cluster at {address} already; end it, or deploy services.replica:application"
        )


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
