"""What a service that runs holds of its home: the lock that says so, its settings, and the folders of its parts."""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.files import lock_file
from infra.settings import Settings, is_plain, plain_path, short_folder

# The model's name in requests.
SERVED_NAME = "target"
# What a recorder answers to anybody; of the server behind it, it says nothing.
RECORDER_HEALTH = "/redraft/healthz"
# Ray puts sockets about 60 characters below its folder, and a socket's path may have 107.
MAX_RAY_DIR, MAX_FRONT_DIR = 40, 80
# Held by the service that runs, with its address in it.
LOCK = ".service.lock"
# Who only looks whether the home is served holds the lock for a moment.
LET_GO_S = 1.0
CONNECT_TIMEOUT_S = 5.0


def config_path(settings: Settings) -> Path:
    """Return the file that the last service was started with; `redraft status` finds the service by it."""
    return settings.home / "service.json"


@contextmanager
def serving(home: Path, url: str) -> Iterator[None]:
    """Hold a home for as long as the block serves it at an address; ValueError if it is served already."""
    with lock_file(home / LOCK, wait_s=LET_GO_S) as is_held:
        if not is_held:
            raise ValueError(served_by(home))
        (home / LOCK).write_text(url)
        yield


def is_served(home: Path) -> bool:
    if not (home / LOCK).exists():
        return False
    with lock_file(home / LOCK, shared=True, wait_s=0) as is_held:
        return not is_held


def served_since_ms(home: Path) -> int | None:
    """Return since when a home is served, whether its service answers yet or not; None if it is not."""
    return (home / LOCK).stat().st_mtime_ns // 1_000_000 if is_served(home) else None


def served_by(home: Path) -> str:
    return f"this home is served already, at {(home / LOCK).read_text() or 'an address that is not known yet'}"


def compiled_folder(cache: Path) -> Path:
    """Return where a service keeps what it compiled of its models, for the next start."""
    return plain_path(cache) / "compiled"


def ray_folder(home: Path) -> Path:
    """Return Ray's folder, whose parent others can't enter: each process of Ray opens it to everybody as it starts."""
    folder = home / "ray"
    return folder if len(str(folder)) <= MAX_RAY_DIR and is_plain(folder) else short_folder() / "ray"


def require_cluster(settings: Settings) -> None:
    """Raise ValueError if a Ray cluster is to be joined and nothing listens at its address."""
    host, _, port = settings.ray_address.rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"REDRAFT_RAY_ADDRESS: nothing listens at {settings.ray_address}: {error}") from error


def front_folder(home: Path) -> Path:
    """Return the folder of the proxy before the service, made now, closed to others; ValueError as `ray_folder`."""
    folder = home / "front"
    if len(str(folder)) > MAX_FRONT_DIR or not is_plain(folder):
        folder = short_folder() / f"front-{hashlib.sha256(os.fsencode(home)).hexdigest()[:16]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder
