"""The service as a process of its own: started with a file of settings, and found again by that file."""

import json
import logging
import os
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from infra.client import Client
from infra.compiling import Compiling
from infra.files import write_atomic
from infra.home import (
    MAX_RAY_DIR,
    RECORDER_HEALTH,
    SERVING,
    compiled_folder,
    config_path,
    is_served,
    ray_folder,
    require_cluster,
    served_by,
)
from infra.keys import bring_keys, keys_path, operator_key, require_client
from infra.machine import openmp_preload
from infra.processes import Child, answers, free_port, require_port_free, wait_until
from infra.settings import RECORD_CONFIG, Settings
from infra.status import RunningService
from infra.supervisor import Program, read_state
from models.types import Frozen

# The first start on a machine may compile the models, for minutes.
START_TIMEOUT_S = 900.0
# What a service takes to end, beyond the time that running requests get.
END_TIMEOUT_S = 30.0
ASK_TIMEOUT_S, TELL_S = 2.0, 1.0
# Programs of `redraft up`.
PREFECT, MLFLOW, SERVICE, RUNNER, ATTACH, RECORD = "prefect", "mlflow", "service", "runner", "attach", "record"
# Answers of a proxy whose application is still starting.
STARTING = (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)

log = logging.getLogger(__name__)


class Attached(Frozen):
    """Somebody else's servers, by their URLs without `/v1`, in the place of a service of ours.

    Attributes:
        read_metrics: their metrics tell how drafts do; rows are imported, and tell which of two drafts is better.
        recorded: URL of what clients' requests go on to: one of them, or a router before them.
        models: names by which it knows the target; without one nothing is recorded here.
        ca: file of the certificates that sign what is recorded, "" for the system's.
    """

    servers: tuple[str, ...]
    resolve: bool = False
    server_cache: str = ""
    weights_url: str = ""
    read_metrics: bool = False
    recorded: str
    models: tuple[str, ...]
    port: int
    ca: str = ""


def require_startable(settings: Settings, port: int) -> None:
    """Refuse what can't be served, by the name of what to change, before anything is started.

    ValueError if the home is served already, the address can't be bound, no cluster is at the one to join, its clients
    would need a key, or neither the home nor the folder of temporary files is short enough for a socket.
    """
    home = settings.home
    if (state := read_state(home)) is not None and (url := state.url(SERVICE)):
        raise ValueError(f"this home is served already, at {url}, by `redraft up`")
    if is_served(home):
        raise ValueError(served_by(home))
    # In a cluster it may be a killed service of this home that holds the port, which the next one ends.
    for name, tried in (("REDRAFT_HOST", 0), ("[serve] port", 0 if settings.ray_address else port)):
        try:
            require_port_free(settings.host, tried)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    require_cluster(settings)
    if (length := len(os.fsencode(folder := ray_folder(home)))) > MAX_RAY_DIR:
        raise ValueError(f"{folder} is {length} bytes long, wanted {MAX_RAY_DIR} for Ray's sockets; shorten TMPDIR")
    bring_keys(keys_path(settings), [(key, None) for key in settings.api_keys])
    require_client(keys_path(settings), settings.host)


def write_config(config: Mapping[str, Any], settings: Settings) -> str:
    """Write what the service is to know (services/config.py), and return its URL; ValueError as `require_startable`.

    Port 0 takes a free one. Clients' keys stay out of the file.
    """
    serve = config["serve"]
    require_startable(settings, serve["port"])
    serve = {**serve, "port": serve["port"] or free_port(settings.host)}
    path = config_path(settings)
    path.touch(mode=0o600)
    told = settings.model_dump(mode="json", exclude={"api_keys"})
    path.write_text(json.dumps({**config, "settings": told, "serve": serve}, indent=1) + "\n")
    return last_url(settings)


def starting(config: Mapping[str, Any], settings: Settings) -> str:
    """Return what a start does, in words: the first one on a machine takes minutes more."""
    if config["engine"].get("enforce_eager") is True or compiled_folder(settings.cache).exists():
        return "starting the service"
    return "starting the service: it compiles its models, once on this machine, which takes minutes"


def service_argv(settings: Settings) -> list[str]:
    return [sys.executable, "-m", "services.main", "--config", str(config_path(settings))]


def health_url(url: str) -> str:
    return f"{url}/health"


def start_service(
    config: Mapping[str, Any], settings: Settings, tell: Callable[[str], None] | None = None
) -> tuple[Child, str]:
    """Start the service, wait until it answers, and return it with its URL; see `write_config`.

    Once a second `tell` gets how far the start is, in words. RuntimeError if the service ended by itself.
    """
    url = write_config(config, settings)
    said, compiling = starting(config, settings), Compiling(compiled_folder(settings.cache))
    told_s, log = time.monotonic(), settings.home / "logs" / "service.log"
    begins = log.stat().st_size if log.exists() else 0

    def ready() -> bool:
        nonlocal told_s
        if tell is not None and time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            tell(f"{said} ({compiling.told()})")
        return answers(health_url(url)) and SERVING.encode() in log.read_bytes()[begins:]

    child = Child.start(service_argv(settings), openmp_preload(), log, "the service")
    return _once(ready, START_TIMEOUT_S, child, health_url(url)), url


def attach_program(config: Mapping[str, Any], settings: Settings) -> Program:
    """Return what keeps somebody else's servers at the champion (services/attach.py), by a config as a service's.

    ValueError if an address is no URL, or a server's comes twice, or drafts are both read and fetched.
    """
    servers, weights_url = config["servers"], config.get("weights_url", "")
    address, *_ = map(_address, [*servers, *([weights_url] if weights_url else [])])
    if weights_url and config.get("server_cache"):
        raise ValueError("--server-cache is for servers that read drafts, and --weights-url for those that fetch them")
    if twice := sorted({server for server in servers if servers.count(server) > 1}):
        raise ValueError(f"server {twice[0]} is named {servers.count(twice[0])} times, wanted each once")
    serve = {**config["serve"], "port": address.port or 80}  # a server's own, whatever a service would bind
    return Program(ATTACH, _argv("services.attach", {**config, "serve": serve}, "attached", address, settings))


def record_program(config: Mapping[str, Any], settings: Settings) -> Program:
    """Return what records the requests to somebody else's server (services/record.py), by its config.

    ValueError if the server's address is no URL, it knows no model of a name, or the port can't be bound.
    """
    address, url = _address(config["server"]), f"http://{settings.host}:{config['port']}"
    require_port_free(settings.host, config["port"])
    _require_models(config["server"], config["models"], config["ca"])
    argv = _argv("services.record", {**config, "host": settings.host}, "recorded", address, settings)
    return Program(RECORD, argv, url=url, health=f"{url}{RECORDER_HEALTH}", first_pause_s=0.1)


def write_recording(config: Mapping[str, Any], settings: Settings) -> str:
    """Write what a server is told that records itself (services/record.py), and return how it is started."""
    path = _write_told(settings.home / "recorded" / "itself.json", config, settings)
    return f"{RECORD_CONFIG}={shlex.quote(str(path))} vllm serve … --middleware services.record.RecordedServer"


def _require_models(server: str, models: Sequence[str], ca: str) -> None:
    """Refuse names that the server does not know, if it says which it knows."""
    try:
        verify = ssl.create_default_context(cafile=ca or None)
        answer = httpx.get(f"{server}/v1/models", timeout=ASK_TIMEOUT_S, verify=verify, trust_env=False)
        known = [one["id"] for one in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("--model is not checked: %s does not say which models it has (%s)", server, type(error).__name__)
        return
    if unknown := sorted({*models} - {*known}):
        raise ValueError(f'--model is "{unknown[0]}", but {server} has {", ".join(known) or "none"}')


def start_program(program: Program, settings: Settings) -> Child:
    """Start one program by itself, and wait until it answers where it answers anybody; errors as `wait_until`."""
    child = Child.start(program.argv, program.env, settings.home / "logs" / f"{program.name}.log", program.name)
    return _once(lambda: not program.health or answers(program.health), program.start_timeout_s, child, program.url)


def _once(ready: Callable[[], bool], timeout_s: float, child: Child, what: str) -> Child:
    try:
        wait_until(ready, timeout_s, child, what)
    except BaseException:
        child.stop()
        raise
    return child


def _address(url: str) -> SplitResult:
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ValueError(f'the address is "{url}", wanted a URL such as http://127.0.0.1:8000')
    return address


def _argv(module: str, config: Mapping[str, Any], folder: str, address: SplitResult, settings: Settings) -> list[str]:
    path = _write_told(settings.home / folder / f"{address.netloc.replace(':', '-')}.json", config, settings)
    return [sys.executable, "-m", module, "--config", str(path)]


def _write_told(path: Path, config: Mapping[str, Any], settings: Settings) -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    told = settings.model_dump(mode="json", exclude={"api_keys"})
    write_atomic(path, json.dumps({**config, "settings": told}, indent=1) + "\n")
    return path


def last_url(settings: Settings) -> str:
    """Return the URL of the service that was started last, running or not; ValueError if none ever was."""
    path = config_path(settings)
    if not path.is_file():
        raise ValueError("no service was started yet; run: redraft serve")
    config = json.loads(path.read_text())
    return f"http://{config['settings']['host']}:{config['serve']['port']}"


def client_of(settings: Settings, url: str = "") -> Client:
    """Return the client of the service that was started last, which it operates, or of another one, as any client."""
    if url and (not config_path(settings).is_file() or url.rstrip("/") != last_url(settings)):
        return Client(url, settings.api_key, operates=False)  # the home's key is nobody else's to see
    return Client(last_url(settings), operator_key(settings.home))


def last_status(settings: Settings) -> RunningService | None:
    """Return what the last service says of itself; None if none is ready; ValueError if it answers something else."""
    if not config_path(settings).is_file():
        return None
    url = last_url(settings)
    with Client(url, operator_key(settings.home), ASK_TIMEOUT_S) as client:
        try:
            return client.status()
        except httpx.TransportError:
            return None
        except httpx.HTTPStatusError as error:
            if error.response.status_code in STARTING:
                return None
            raise ValueError(f"{url} answers {error.response.status_code}: {error.response.text[:200]}") from error
