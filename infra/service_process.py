"""The service as a process of its own: started with a file of settings, and found again by that file."""

import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

import httpx

from infra.client import Client
from infra.compiling import Compiling
from infra.files import write_atomic
from infra.installed import openmp_preload
from infra.keys import bring_keys, keys_path, operator_key, require_client
from infra.processes import Child, answers, free_port, require_port_free, wait_until
from infra.serving import compiled_folder, config_path, is_served, served_by
from infra.settings import RECORD_CONFIG, Settings
from infra.status import RunningService
from infra.supervisor import read_state

# The first start on a machine may compile the models, for minutes.
START_TIMEOUT_S = 900.0
# What a service takes to end, beyond the time that running requests get.
END_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 2.0
TELL_S = 1.0
WATCH_S = 0.1
WRONG = 2  # exit code of a program that can't run with its settings
SIGNALLED = 128  # exit codes above are of programs that somebody ended (`Child.poll`)
# Answers of a proxy whose application is still starting.
STARTING = (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)


def require_startable(settings: Settings, port: int) -> None:
    """Refuse what can't be served, by the name of what to change, before anything is started.

    Raises:
        ValueError: the home is served already, the address can't be bound, or its clients would need a key.
    """
    home = settings.home
    if (state := read_state(home)) is not None and (url := state.url("service")):
        raise ValueError(f"this home is served already, at {url}, by `redraft up`")
    if is_served(home):
        raise ValueError(served_by(home))
    for name, tried in (("REDRAFT_HOST", 0), ("[serve] port", port)):
        try:
            require_port_free(settings.host, tried)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
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
    """Return the program that serves what was written."""
    return [sys.executable, "-m", "services.main", "--config", str(config_path(settings))]


def health_url(url: str) -> str:
    """Return what a service answers as soon as it is ready."""
    return f"{url}/healthz"


def start_service(
    config: Mapping[str, Any], settings: Settings, tell: Callable[[str], None] | None = None
) -> tuple[Child, str]:
    """Start the service, wait until it answers, and return it with its URL; see `write_config`.

    Once a second `tell` gets how far the start is, in words.

    Raises:
        ValueError: see `require_startable`.
        RuntimeError: the service ended by itself.
    """
    url = write_config(config, settings)
    said, compiling = starting(config, settings), Compiling(compiled_folder(settings.cache))
    told_s = time.monotonic()

    def ready() -> bool:
        nonlocal told_s
        if tell is not None and time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            tell(f"{said} ({compiling.told()})")
        return answers(health_url(url))

    child = Child.start(service_argv(settings), openmp_preload(), settings.home / "logs" / "service.log", "the service")
    try:
        wait_until(ready, START_TIMEOUT_S, child, health_url(url))
    except BaseException:
        child.stop()
        raise
    return child, url


def start_attachment(config: Mapping[str, Any], settings: Settings) -> Child:
    """Start what keeps somebody else's servers at the champion (services/attach.py), and return it.

    Args:
        config: as a service's, with `servers` and `server_cache`.
        settings: where everything lies.

    Raises:
        ValueError: a server's address is no URL, or comes twice.
    """
    servers: list[str] = config["servers"]
    address, *_ = map(_address, servers)
    if twice := sorted({server for server in servers if servers.count(server) > 1}):
        raise ValueError(f"server {twice[0]} is named {servers.count(twice[0])} times, wanted each once")
    serve = {**config["serve"], "port": address.port or 80}  # a server's own, whatever a service would bind
    return _start_beside("services.attach", "attached", address, {**config, "serve": serve}, settings)


def keep_recording(config: Mapping[str, Any], settings: Settings, tell: Callable[[str], None]) -> NoReturn:
    """Keep running what records the requests to somebody else's server (services/record.py), until Ctrl-C.

    Args:
        config: what its RecordConfig holds, without `host` and `settings`.
        settings: where everything lies.
        tell: gets what happens, in words.

    Raises:
        ValueError: the server's address is no URL, it knows no model of a name, or the port can't be bound.
        RuntimeError: it ends by itself before it ever listened.
    """
    address = _address(config["server"])
    require_port_free(settings.host, config["port"])
    _require_models(config["server"], config["models"], config["ca"], tell)
    whole, first = {**config, "host": settings.host}, True
    while True:
        child, listened = _start_beside("services.record", "recorded", address, whole, settings), False
        tell(f"{settings.host}:{config['port']} passes requests on to {config['server']}, log in {child.log_path}")
        try:
            while (code := child.poll()) is None:
                listened = listened or _listens(settings.host, config["port"])
                time.sleep(WATCH_S)
        finally:
            child.stop(END_TIMEOUT_S)
        if first and (code == WRONG or not (listened or code > SIGNALLED)):
            raise RuntimeError(f"{child.name} ended with exit code {code}\n{child.tail()}")
        tell(f"{child.name} ended with exit code {code}, and is started again")
        first = False
        time.sleep(0 if listened else TELL_S)


def write_recording(config: Mapping[str, Any], settings: Settings) -> str:
    """Write what a server is told that records itself (services/record.py), and return how it is started."""
    path = _write_beside("recorded", "itself", config, settings)
    return f"{RECORD_CONFIG}={path} vllm serve … --middleware services.record.RecordedServer"


def _require_models(server: str, models: Sequence[str], ca: str, tell: Callable[[str], None]) -> None:
    """Refuse names that the server does not know; one that does not say which it knows is told."""
    try:
        verify = ssl.create_default_context(cafile=ca or None)
        answer = httpx.get(f"{server}/v1/models", timeout=ASK_TIMEOUT_S, verify=verify, trust_env=False)
        known = [one["id"] for one in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        tell(f"--model is not checked: {server} does not say which models it has ({type(error).__name__})")
        return
    if unknown := sorted({*models} - {*known}):
        raise ValueError(f'--model is "{unknown[0]}", but {server} has {", ".join(known) or "none"}')


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ASK_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _address(server: str) -> SplitResult:
    address = urlsplit(server)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ValueError(f'server is "{server}", wanted a URL such as http://127.0.0.1:8000')
    return address


def _start_beside(module: str, name: str, address: SplitResult, config: Mapping[str, Any], settings: Settings) -> Child:
    """Start a program that works on somebody else's server, with its settings in a file of the home."""
    host = address.netloc.replace(":", "-")
    path = _write_beside(name, host, config, settings)
    argv = [sys.executable, "-m", module, "--config", str(path)]
    return Child.start(argv, None, settings.home / "logs" / f"{name}-{host}.log", f"{module} for {address.geturl()}")


def _write_beside(name: str, host: str, config: Mapping[str, Any], settings: Settings) -> Path:
    path = settings.home / name / f"{host}.json"
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
    """Return the client of the service that was started last, which it operates, or of another one, as any client.

    Raises:
        ValueError: no service was ever started here.
    """
    if url and (not config_path(settings).is_file() or url.rstrip("/") != last_url(settings)):
        return Client(url, settings.api_key, operates=False)  # the home's key is nobody else's to see
    return Client(last_url(settings), operator_key(settings.home))


def last_status(settings: Settings) -> RunningService | None:
    """Return what the last service says of itself; None if none runs or it is not ready yet.

    Raises:
        ValueError: it answers something else, such as that the key is wrong.
    """
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
