"""The home folder's format: a number in a small file, and the steps that bring an older home up to date.

A home without the file is of format 1, the one before formats were numbered. Steps run under a lock, one after the
other; each can be repeated, and the number moves after it, so that a process which is killed in between does no harm.
Most of what a home holds needs no step, because it is read leniently: a version's tags (infra/registry.py), drafts that
don't name their family (models/drafts), what a service remembers. The query log's schema has a number of its own
(infra/logfile.py).
"""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.service_process import config_path
from infra.settings import Settings

FORMAT_FILE, LOCK_FILE = "home.json", ".home.lock"


def open_home(settings: Settings) -> None:
    """Make the home folder, or bring an older one up to date.

    Raises:
        ValueError: the home is of a newer format, or a file of it can't be read.
    """
    home = settings.home
    home.mkdir(parents=True, exist_ok=True)
    if _format(home) == latest_format():
        return
    with (home / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, by kill -9 too
        for number in range(_format(home), latest_format()):
            STEPS[number - 1](settings)
            _write(home / FORMAT_FILE, {"format": number + 1})


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


def _fold_serving(settings: Settings) -> None:
    """Bring the service's configuration to one table of how it serves; drafts of any family are followed."""
    file = config_path(settings)
    if not file.is_file():
        return
    config = _read(file)
    serve = config.setdefault("serve", {})
    for key in ("poll_s", "min_swap_interval_s", "drain_s", "tool_parser", "probation", "watch"):
        if key in config:
            serve[key] = config.pop(key)
    for key in ("max_ongoing_requests", "max_queued_requests", "max_body_bytes", "body_timeout_s"):
        if key in config:
            serve.setdefault("limits", {})[key] = config.pop(key)
    if "draft" in config:
        config["follow_drafts"] = config.pop("draft") is not None
    _write(file, config)


def _drop_cooldown(settings: Settings) -> None:
    """Take out how often the watch may tell: how often a refresh is tried is the orchestrator's."""
    file = config_path(settings)
    if not file.is_file():
        return
    config = _read(file)
    config.get("serve", {}).get("watch", {}).pop("cooldown_s", None)
    _write(file, config)


# Step n brings a home of format n to n + 1.
STEPS: tuple[Callable[[Settings], None], ...] = (_fold_serving, _drop_cooldown)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, wanted a JSON object")
    return values


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write in one rename, flushed to the disk; readable by the owner alone, since keys may be in it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            json.dump(values, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
