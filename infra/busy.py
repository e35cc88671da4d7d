"""Whether the service of a home is answering: it holds a lock meanwhile, so that work beside it can give way.

What it runs on stands in the locked file, for work that runs on something else has no need to.

The lock is of the kind that belongs to an open file (Linux, `F_OFD_SETLK`): the kernel releases it with the process,
however that ends, and who only looks takes nothing, so that nobody ever waits for it.
"""

import fcntl
import json
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

BUSY_FILE = "service.busy"

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_HAS_LOCKS = sys.platform == "linux"


class Busy:
    def __init__(self, home: Path) -> None:
        self._file = os.open(home / BUSY_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tell(self, answering: bool) -> None:
        if _HAS_LOCKS:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK if answering else fcntl.F_UNLCK))

    def __call__(self) -> bool:
        """Return whether another than this object says that requests are being answered; takes a microsecond."""
        if not _HAS_LOCKS:
            return False
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def occupy(self, devices: Iterable[str]) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(sorted(devices)).encode(), 0)

    def shares(self, devices: Iterable[str]) -> bool:
        """Return whether the service runs on any of these, as is believed of one that did not say."""
        try:
            occupied = json.loads(Path(f"/proc/self/fd/{self._file}").read_text())
        except (OSError, ValueError):
            return True
        return not {*occupied}.isdisjoint(devices)

    def close(self) -> None:
        os.close(self._file)


def cores() -> set[str]:
    return {f"core {number}" for number in os.sched_getaffinity(0)}


def gpus(first: int, number: int) -> set[str]:
    """Return the names of some GPUs, which this process counts among those that CUDA_VISIBLE_DEVICES lets it see."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return {f"gpu {visible[at] if at < len(visible) else at}" for at in range(first, first + number)}


def _lock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
