"""The home folder: closed to other users, of a format that is a number in a small file, with secrets, served once.

A volume's root stays its owner's, who says which group may enter it, as Kubernetes does with `fsGroup`: what lies in it
is closed. The query log has a number of its own (infra/tables.py).

A secret is 32 random bytes in a file that its owner alone may read, made once. `split.key` is what clients must not
know, so that they can't compute where their prompts fall. Whoever removes it draws new splits: hashes under the old one
are made anew, and regression sets keep their members. Names of groups are kept nowhere, so that a group's rows from
before and after are two groups then.
"""

import hashlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from infra.files import lock_file, write_atomic
from infra.settings import Settings, is_plain, plain_path, short_folder

FORMAT_FILE = "home.json"
COPIES = "backups"  # folder of the databases that a restore replaced
FORMAT = 8  # raise it with every change to what a home holds that an earlier or a later version can't read
OTHERS = 0o077
OTHER_FORMAT = "use the version that made it, or begin a new home: set REDRAFT_HOME to a new folder, run: redraft build"
OF_FILE_SYSTEM = "lost+found"  # of a volume's root, and nobody's to close
SPLIT_KEY = "split.key"
SECRET_BYTES = 32
# The model's name in requests.
SERVED_NAME = "target"
# What a service prints once it is up. In a cluster one that was killed may answer until then.
SERVING = f"serving {SERVED_NAME}"
# What a recorder answers to anybody; of the server behind it, it says nothing.
RECORDER_HEALTH = "/redraft/healthz"
# Ray puts sockets about 60 characters below its folder, and a socket's path may have 107.
MAX_RAY_DIR, MAX_FRONT_DIR = 40, 80
# Held by the service that runs, with its address in it.
LOCK = ".service.lock"
# Who only looks whether the home is served holds the lock for a moment.
LET_GO_S = 1.0
CONNECT_TIMEOUT_S = 5.0


def open_home(settings: Settings) -> None:
    """Make the home folder, or check the format of one that is there; all that is written from now on is closed.

    ValueError if it or its query log is of another format, or it can't be closed to other users.
    """
    os.umask(OTHERS)
    home = settings.home
    home.mkdir(parents=True, exist_ok=True)
    if home.stat().st_mode & OTHERS:
        close_to_others(home)
    file = home / FORMAT_FILE
    if file.is_file():
        try:
            number = json.loads(file.read_bytes())["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not name the format of a home: {error}") from error
        if number != FORMAT:
            reads = f"this version of redraft reads format {FORMAT} alone: {OTHER_FORMAT}"
            raise ValueError(f"{home} is of format {number!r}, and {reads}")
        return
    if settings.beside_log.is_file():  # a home of before formats were numbered has a log that is older too
        from infra.database import Database  # SQLAlchemy takes a second, and only such a home needs it

        database = Database(settings.beside_log)
        with database.reading():
            database.close()
    write_atomic(file, json.dumps({"format": FORMAT}))


def close_to_others(folder: Path) -> None:
    """Take from other users what they may do with a folder and all in it; ValueError if a part is somebody else's."""
    left = {folder, folder / OF_FILE_SYSTEM} if _is_volume(folder) else set()
    for inner, folders, files in os.walk(folder, topdown=False):
        for path in [*(Path(inner, name) for name in (*files, *folders)), Path(inner)]:
            try:
                mode = path.lstat().st_mode
                if mode & OTHERS and not stat.S_ISLNK(mode) and path not in left:
                    path.chmod(stat.S_IMODE(mode) & ~OTHERS)
            except FileNotFoundError:  # whatever runs here may remove its files meanwhile
                continue
            except PermissionError:
                fix = "; set REDRAFT_HOME to a new folder in it" if path == folder else ""
                raise ValueError(f"other users may read {path}, and only its owner can change that{fix}") from None


def _is_volume(folder: Path) -> bool:
    """Whether a folder is a mount's root that is somebody else's, for a group of this process's, and closed to all."""
    if not folder.is_mount():
        return False
    root, groups = folder.stat(), {os.getegid(), *os.getgroups()}
    return root.st_uid != os.geteuid() and root.st_gid in groups and not root.st_mode & stat.S_IWOTH


def home_secret(home: Path, name: str = SPLIT_KEY) -> bytes:
    """Return a secret of the home, made now if there is none; ValueError if it is torn, or others may read it."""
    file = home / name
    if not file.exists():
        _make(file)
    found = file.read_bytes()
    if len(found) != SECRET_BYTES:
        raise ValueError(f"{file} holds {len(found)} bytes, wanted {SECRET_BYTES}; remove it, and a new one is made")
    if file.stat().st_mode & OTHERS:
        raise ValueError(f"others may read {file}; remove it, and a new one is made")
    return found


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as stream, suppress(FileExistsError):
        stream.write(secrets.token_bytes(SECRET_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
        file.hardlink_to(stream.name)  # unlike a rename it replaces nothing: the first one stays


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
