"""What a service that runs holds of its home: the lock that says so, its settings, and the folders of its parts."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.files import lock_file
from infra.settings import Settings

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


def served_by(home: Path) -> str:
    return f"this home is served already, at {(home / LOCK).read_text() or 'an address that is not known yet'}"


def compiled_folder(cache: Path) -> Path:
    """Return where a service keeps what it compiled of its models, for the next start."""
    return cache / "compiled"


def ray_folder(home: Path) -> Path:
    """Return Ray's folder, whose parent others can't enter: each process of Ray opens it to everybody as it starts."""
    return home / "ray" if len(str(home / "ray")) <= MAX_RAY_DIR else _short_folder() / "ray"


def front_folder(home: Path) -> Path:
    """Return the folder of the proxy before the service, made now, closed to others; ValueError as `ray_folder`."""
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
