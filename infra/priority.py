"""What trains gives way to a service: in a thread of low priority, where the service is answering, and in memory.

Linux keeps a priority for each thread, and the threads that torch starts for it inherit it. A process that lowered its
own could not raise it again. Many kernels group processes by session, though, and a thread's priority then only counts
among the threads of its session: against a service in another one the whole session has to give way.

A service holds a lock while it answers. What it runs on stands in the locked file, since work on something else need
not wait. The lock belongs to an open file (Linux, `F_OFD_SETLK`): the kernel releases it with the process, however that
ends, and who only looks takes nothing.

When memory of the machine or container runs short, whatever trains goes first, the service last. Three ends are told
apart, and each comes before the next. A process that trains ends itself once more than TRAINER_ENDS_AT of the memory is
used. Ray's own monitor ends proxy, controller and replica, so it is set to wait until SERVICE_ENDS_AT. The kernel's
killer takes who offers itself by its score: a trainer, and everything it started.
"""

import contextvars
import ctypes
import fcntl
import functools
import json
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from infra.home import is_served
from infra.settings import load_settings

# Beside threads that are always busy, about a tenth of a core is left: slow, but not starved as at 19.
NICENESS = 10
BUSY_FILE = "service.busy"
_AUTOGROUP = Path("/proc/self/autogroup")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_HAS_LOCKS = sys.platform == "linux"

# Shares of the memory that are used.
TRAINER_ENDS_AT, SERVICE_ENDS_AT = 0.90, 0.95
GIB = 1 << 30

# A trainer that takes new memory as fast as it can needs half a second for a GiB.
PERIOD_S = 0.1
# Last words are one small write; they must not keep the memory from being given back.
LAST_WORDS_S = 0.5
# What a shell says of a process that was ended by SIGKILL.
KILLED = 137
# Of −1000 to 1000: above every process that did not ask for it, below one that was marked by hand.
FIRST_TO_GO = 900

CGROUPS = Path("/sys/fs/cgroup")
# Limit, usage, and what of the usage are files' pages, which are given back when memory is wanted.
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


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


class MemoryUsage(NamedTuple):
    total: int
    used: int

    @property
    def share(self) -> float:
        return self.used / self.total

    @property
    def room_gib(self) -> float:
        """What may still be taken before a trainer has to go."""
        return (self.total * TRAINER_ENDS_AT - self.used) / GIB


def read_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = CGROUPS) -> MemoryUsage:
    """Return the machine's memory or, if less of it is left, that of this container."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    found = [MemoryUsage(total, total - free)]
    for limit, usage, stat, names in CGROUP_FILES:
        with suppress(OSError, ValueError, KeyError):  # "max", or the other version of cgroups
            pages = dict(line.split() for line in (cgroups / stat).read_text().splitlines())
            files = sum(int(pages[name]) for name in names)
            bound = int((cgroups / limit).read_text())
            if 0 < bound < total:
                found.append(MemoryUsage(bound, max(0, int((cgroups / usage).read_text()) - files)))
    return max(found, key=lambda one: one.share)


def free_memory_gib() -> float:
    """Return the memory that a new process can take without swapping."""
    memory = read_memory()
    return (memory.total - memory.used) / GIB


def own_gib() -> float:
    """Return the memory that this process alone holds, files' pages left out."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024 / GIB


def go_first() -> None:
    """Offer this process and all that it starts to the kernel's killer, for good: only root could take it back."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError):  # no procfs, or a sandbox that lets nobody write there
        score.write_text(str(max(FIRST_TO_GO, int(score.read_text()))))


def end_with_children() -> NoReturn:
    """End this process at once, as kill -9 does, and whatever it started: that holds memory too."""
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(KILLED)


class Watchdog:
    """Ends the process when memory runs short, if there is a service to spare; `peak_gib` is the most it held."""

    def __init__(
        self,
        spares: Callable[[], bool],
        last_words: Callable[[str], None] = lambda why: None,
        read: Callable[[], MemoryUsage] = read_memory,
        end: Callable[[], object] = end_with_children,
    ) -> None:
        """Take what says whether a service runs that would go otherwise, and what hears why before the process ends."""
        self.peak_gib = 0.0
        self._spares, self._last_words, self._read, self._end = spares, last_words, read, end
        self._done = threading.Event()

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()

    def _watch(self) -> None:
        while not self._done.wait(PERIOD_S):
            self.peak_gib = max(self.peak_gib, own_gib())
            memory = self._read()
            if memory.share > TRAINER_ENDS_AT and self._spares():
                why = f"{memory.share:.0%} of {memory.total / GIB:.1f} GiB are used, {TRAINER_ENDS_AT:.0%} may be"
                log.error("memory runs short, and this process goes before the service: %s", why)
                speaker = threading.Thread(target=self._last_words, args=(why,), daemon=True)
                speaker.start()
                speaker.join(LAST_WORDS_S)
                self._end()
                return


def gives_way(work: Callable[P, T]) -> Callable[P, T]:
    """Return `work`, whose process ends when memory runs short beside the service of its home."""

    @functools.wraps(work)
    def watched(*args: P.args, **kwargs: P.kwargs) -> T:
        home = load_settings().home
        with Watchdog(lambda: is_served(home)).watching():
            return work(*args, **kwargs)

    return watched


def _descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield from _descendants(child)
                yield child
