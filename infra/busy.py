"""Whether the service of a home is answering: it holds a lock meanwhile, so that work beside it can give way.

The lock is of the kind that belongs to an open file (Linux, `F_OFD_SETLK`): the kernel releases it with the process,
however that ends, and who only looks takes nothing, so that nobody ever waits for it.
"""

import fcntl
import os
import struct
import sys
from pathlib import Path

BUSY_FILE = "service.busy"

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_HAS_LOCKS = sys.platform == "linux"


class Busy:
    """The lock of a home, for the service that holds it or for who looks at it."""

    def __init__(self, home: Path) -> None:
        """Open the file, made where it is missing."""
        self._file = os.open(home / BUSY_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tell(self, answering: bool) -> None:
        """Say whether requests are being answered."""
        if _HAS_LOCKS:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK if answering else fcntl.F_UNLCK))

    def __call__(self) -> bool:
        """Return whether another than this object says that requests are being answered; takes a microsecond."""
        if not _HAS_LOCKS:
            return False
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lock, and close the file."""
        os.close(self._file)


def _lock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
