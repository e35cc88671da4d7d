"""The service as a process of its own: started with a file of settings, and found again by that file."""

import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

from infra.client import Client
from infra.compiling import Compiling
from infra.doctor import openmp_preload
from infra.keys import bring_keys, keys_path, operator_key, require_client
from infra.processes import Child, answers, free_port, require_port_free, wait_until
from infra.settings import Settings
from infra.status import RunningService
from infra.supervisor import read_state

# The first start on a machine may compile the models, for minutes.
START_TIMEOUT_S = 900.0
# What a service takes to end, beyond the time that running requests get.
END_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 2.0
TELL_S = 1.0
# Ray puts sockets about 60 characters below its folder, and a socket's path may have 107.
MAX_RAY_DIR = 40
MAX_FRONT_DIR = 80
# Held by the service that runs, with its address in it.
LOCK = ".service.lock"
# Who only looks whether the home is served holds the lock for a moment.
LET_GO_S, POLL_S = 1.0, 0.05
# Answers of a proxy whose application is still starting.
STARTING = (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)


def config_path(settings: Settings) -> Path:
    """Return the file that the last service was started with; `redraft status` finds the service by it."""
    return settings.home / "service.json"


@contextmanager
def serving(home: Path, url: str) -> Iterator[None]:
    """Hold a home for as long as the block serves it at an address; kill -9 lets go of it too.

    Raises:
        ValueError: it is served already, at the address that the message names.
    """
    with (home / LOCK).open("a+") as lock:
        until_s = time.monotonic() + LET_GO_S
        while not _held(lock, fcntl.LOCK_EX):
            if time.monotonic() > until_s:
                raise ValueError(_served_by(lock))
            time.sleep(POLL_S)
        lock.seek(0)
        lock.truncate()
        lock.write(url)
        lock.flush()
        yield


def is_served(home: Path) -> bool:
    """Return whether a service runs on a home."""
    if not (home / LOCK).exists():
        return False
    with (home / LOCK).open("r") as lock:
        return not _held(lock, fcntl.LOCK_SH)


def require_startable(settings: Settings, port: int) -> None:
    """Refuse what can't be served, by the name of what to change, before anything is started.

    Args:
        settings: of the home that is to be served.
        port: TCP port; 0 takes a free one.

    Raises:
        ValueError: the home is served already, the address can't be bound, or its clients would need a key.
    """
    home = settings.home
    if (state := read_state(home)) is not None and (url := state.url("service")):
        raise ValueError(f"this home is served already, at {url}, by `redraft up`")
    if is_served(home):
        with (home / LOCK).open("r") as lock:
            raise ValueError(_served_by(lock))
    for name, tried in (("REDRAFT_HOST", 0), ("[serve] port", port)):
        try:
            require_port_free(settings.host, tried)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    bring_keys(keys_path(settings), [(key, None) for key in settings.api_keys])
    require_client(keys_path(settings), settings.host)


def write_config(config: Mapping[str, Any], settings: Settings) -> str:
    """Write what the service is to know (services/config.py), and return the URL that it will have.

    Args:
        config: port 0 takes a free one.
        settings: where everything lies.

    Raises:
        ValueError: see `require_startable`.
    """
    require_startable(settings, config["port"])
    host, port = config["host"], config["port"] or free_port(config["host"])
    path = config_path(settings)
    path.touch(mode=0o600)
    path.write_text(json.dumps({**config, "port": port}, indent=1) + "\n")
    return f"http://{host}:{port}"


def compiled_folder(cache: Path) -> Path:
    """Return where a service keeps what it compiled of its models, for the next start."""
    return cache / "compiled"


def ray_folder(home: Path) -> Path:
    """Return Ray's folder, whose parent others can't enter: each process of Ray opens it to everybody as it starts.

    Raises:
        ValueError: the home's path is too long, and the folder that stands in for it is somebody else's.
    """
    return home / "ray" if len(str(home / "ray")) <= MAX_RAY_DIR else _short_folder() / "ray"


def front_folder(home: Path) -> Path:
    """Return the folder of the proxy before the service, made now, which other users can't enter.

    Raises:
        ValueError: see `ray_folder`.
    """
    folder = home / "front"
    if len(str(folder)) > MAX_FRONT_DIR:
        folder = _short_folder() / f"front-{hashlib.sha256(os.fsencode(home)).hexdigest()[:16]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _short_folder() -> Path:
    parent = Path(tempfile.gettempdir()) / f"redraft-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ValueError(
            f"{parent} is not this user's folder; set TMPDIR to one that is, or choose a shorter REDRAFT_HOME"
        )
    parent.chmod(0o700)
    return parent


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

    Args:
        config: of the service.
        settings: where everything lies.
        tell: is told once a second how far the start is, in words.

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


def last_url(settings: Settings) -> str:
    """Return the URL of the service that was started last, running or not.

    Raises:
        ValueError: no service was ever started here.
    """
    path = config_path(settings)
    if not path.is_file():
        raise ValueError("no service was started yet; run: redraft serve")
    config = json.loads(path.read_text())
    return f"http://{config['host']}:{config['port']}"


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


def _held(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _served_by(lock: IO[str]) -> str:
    lock.seek(0)
    return f"this home is served already, at {lock.read() or 'an address that is not known yet'}"
