"""The home folder: closed to other users, and of a format that is a number in a small file; another one is refused.

A volume's root stays its owner's, who says which group may enter it, as Kubernetes does with `fsGroup`: what lies in it
is closed.

The query log has a number of its own (infra/tables.py).
"""

import json
import os
import stat
from pathlib import Path

from infra.files import write_atomic
from infra.settings import Settings

FORMAT_FILE = "home.json"
COPIES = "backups"  # folder of the databases that a restore replaced
FORMAT = 8  # raise it with every change to what a home holds that an earlier or a later version can't read
OTHERS = 0o077
OTHER_FORMAT = "use the version that made it, or begin a new home: set REDRAFT_HOME to a new folder, run: redraft build"
OF_FILE_SYSTEM = "lost+found"  # of a volume's root, and nobody's to close


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
