"""The home folder: closed to other users, and of a format that is a number in a small file, with steps up to it.

A home without the file is of format 1, the one before formats were numbered. Steps run under a lock, one after the
other; each can be repeated, and the number moves after it, so that a process which is killed in between does no harm.
Most of what a home holds needs no step, because it is read leniently: a version's tags (infra/versions.py), drafts that
don't name their family (models/drafts), what a service remembers. The query log's schema has a number of its own
(infra/logfile.py). What a step may change is copied first, into the folder `backups`; the registry's database is
upgraded by nobody.
"""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.artifacts import renamed_when_complete
from infra.keys import bring_keys, keys_path
from infra.logfile import COPIES
from infra.serving import config_path
from infra.settings import Settings

FORMAT_FILE, LOCK_FILE = "home.json", ".home.lock"
OTHERS = 0o077


def open_home(settings: Settings) -> None:
    """Make the home folder, or bring an older one up to date; what this process and its children write is closed.

    Raises:
        ValueError: the home is of a newer format, a file of it can't be read, or it can't be closed to other users.
    """
    os.umask(OTHERS)
    home = settings.home
    home.mkdir(parents=True, exist_ok=True)
    if home.stat().st_mode & OTHERS:
        close_to_others(home)
    if _format(home) == latest_format():
        return
    with (home / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, by kill -9 too
        _keep_copy(settings, _format(home))
        for number in range(_format(home), latest_format()):
            STEPS[number - 1](settings)
            _write(home / FORMAT_FILE, {"format": number + 1})


def close_to_others(folder: Path) -> None:
    """Take from other users whatever they may do with a folder and all in it; the folder itself comes last.

    Raises:
        ValueError: a part of it belongs to somebody else.
    """
    for inner, folders, files in os.walk(folder, topdown=False):
        for path in [*(Path(inner, name) for name in (*files, *folders)), Path(inner)]:
            try:
                mode = path.lstat().st_mode
                if mode & OTHERS and not stat.S_ISLNK(mode):
                    path.chmod(stat.S_IMODE(mode) & ~OTHERS)
            except FileNotFoundError:  # whatever runs here may remove its files meanwhile
                continue
            except PermissionError:
                raise ValueError(f"other users may read {path}, and only its owner can change that") from None


def latest_format() -> int:
    """Return the format that this version of redraft writes."""
    return 1 + len(STEPS)


def _format(home: Path) -> int:
    file = home / FORMAT_FILE
    if not file.is_file():
        return 1
    number = _read(file).get("format")
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{file} says format {number!r}, wanted a number from 1")
    if number > latest_format():
        raise ValueError(
            f"{home} is of format {number}, and this version of redraft knows up to {latest_format()}: "
            "upgrade redraft, or set REDRAFT_HOME to another folder"
        )
    return number


def _keep_copy(settings: Settings, number: int) -> None:
    """Copy what a home is described by, as it is before any step; one that was copied before stays."""
    files = [file for file in sorted(settings.home.glob("*.json")) if not file.name.startswith(".")]
    copies = settings.home / COPIES / f"format-{number}"
    if files and number < latest_format() and not copies.exists():
        with renamed_when_complete(copies) as folder:
            for file in files:
                shutil.copyfile(file, folder / file.name)


def _of_service(edit: Callable[[Settings, dict[str, Any]], None]) -> Callable[[Settings], None]:
    """Return the step that edits the service's configuration, where a home has one."""

    def step(settings: Settings) -> None:
        file = config_path(settings)
        if file.is_file():
            config = _read(file)
            edit(settings, config)
            _write(file, config)

    return step


@_of_service
def _fold_serving(settings: Settings, config: dict[str, Any]) -> None:
    """Bring the service's configuration to one table of how it serves; drafts of any family are followed."""
    serve = config.setdefault("serve", {})
    for key in ("poll_s", "min_swap_interval_s", "drain_s", "tool_parser", "probation", "watch"):
        if key in config:
            serve[key] = config.pop(key)
    for key in ("max_ongoing_requests", "max_queued_requests", "max_body_bytes", "body_timeout_s"):
        if key in config:
            serve.setdefault("limits", {})[key] = config.pop(key)
    if "draft" in config:
        config["follow_drafts"] = config.pop("draft") is not None


@_of_service
def _drop_cooldown(settings: Settings, config: dict[str, Any]) -> None:
    """Take out how often the watch may tell: how often a refresh is tried is the orchestrator's."""
    config.get("serve", {}).get("watch", {}).pop("cooldown_s", None)


@_of_service
def _hash_keys(settings: Settings, config: dict[str, Any]) -> None:
    """Move the keys that the service's configuration held into a file of their hashes."""
    held = [one if isinstance(one, dict) else {"key": one} for one in config.pop("api_keys", [])]
    bring_keys(keys_path(settings), [(one["key"], one.get("log")) for one in held])
    config["keys"] = str(keys_path(settings))


@_of_service
def _name_mlflow(settings: Settings, config: dict[str, Any]) -> None:
    """Call the registry's two addresses in the service's configuration as the settings call them."""
    for old, new in (("registry_uri", "mlflow_uri"), ("artifact_root", "mlflow_files")):
        if old in config:
            config[new] = config.pop(old)


@_of_service
def _drop_ongoing(settings: Settings, config: dict[str, Any]) -> None:
    """Take out how many requests the engine gets at once: how many sequences it decodes at once bounds that."""
    config.get("serve", {}).get("limits", {}).pop("max_ongoing_requests", None)


# Step n brings a home of format n to n + 1.
STEPS: tuple[Callable[[Settings], None], ...] = (_fold_serving, _drop_cooldown, _hash_keys, _name_mlflow, _drop_ongoing)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, wanted a JSON object")
    return values


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write in one rename, flushed to the disk; readable by the owner alone."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            json.dump(values, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
