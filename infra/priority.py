"""Work that gives way to a service: in a thread of low priority, and where the service of its home is answering.

Linux keeps a priority for each thread, and the threads that torch starts for it inherit it. A process that lowered its
own could not raise it again. Many kernels group processes by session, though, and a thread's priority then only counts
among the threads of its session: against a service in another one the whole session has to give way.

A service holds a lock while it answers. What it runs on stands in the locked file, since work on something else need
not wait. The lock belongs to an open file (Linux, `F_OFD_SETLK`): the kernel releases it with the process, however that
ends, and who only looks takes nothing.
"""

import contextvars
import ctypes
import fcntl
import functools
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

# Beside threads that are always busy, about a tenth of a core is left: slow, but not starved as at 19.
NICENESS = 10
BUSY_FILE = "service.busy"

_AUTOGROUP = Path("/proc/self/autogroup")

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_HAS_LOCKS = sys.platform == "linux"

P = ParamSpec("P")
T = TypeVar("T")


def lower_session() -> bool:
    """Let this session give way for good, if this process leads it and the kernel groups by session; return whether."""
    if os.getsid(0) != os.getpid() or not _AUTOGROUP.exists():
        return False
    try:
        _AUTOGROUP.write_text(str(NICENESS))
    except OSError:  # a sandbox where nobody may write there
        return False
    return True


def at_low_priority(work: Callable[P, T]) -> Callable[P, T]:
    """Return `work`, run in a thread of low priority; the caller waits, and an interrupt of the caller ends it."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        result: Future[T] = Future()
        context = contextvars.copy_context()

        def body() -> None:
            try:
                number = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))
                result.set_result(context.run(work, *args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
                result.set_exception(error)

        thread = threading.Thread(target=body, name=f"at low priority: {work.__qualname__}")
        thread.start()
        try:
            return result.result()
        finally:
            if not result.done() and thread.ident is not None:
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), interrupt)
            thread.join()

    return run


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
