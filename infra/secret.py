"""The home's secrets: 32 random bytes each, in a file that its owner alone may read, made once.

`split.key` is what clients must not know, so that they can't compute where their prompts fall. Whoever removes it draws
new splits: hashes under the old one are made anew, and regression sets keep their members. Names of groups are kept
nowhere, so that a group's rows from before and after are two groups then.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

NAME = "split.key"
NUM_BYTES = 32


def home_secret(home: Path, name: str = NAME) -> bytes:
    """Return a secret of the home, made now if there is none; ValueError if it is torn, or others may read it."""
    file = home / name
    if not file.exists():
        _make(file)
    found = file.read_bytes()
    if len(found) != NUM_BYTES:
        raise ValueError(f"{file} holds {len(found)} bytes, wanted {NUM_BYTES}; remove it, and a new one is made")
    if file.stat().st_mode & 0o077:
        raise ValueError(f"others may read {file}; remove it, and a new one is made")
    return found


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as stream, suppress(FileExistsError):
        stream.write(secrets.token_bytes(NUM_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
        file.hardlink_to(stream.name)  # unlike a rename it replaces nothing: the first one stays
