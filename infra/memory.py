"""Memory of this machine or container, and the shares of it at which somebody has to go (infra/watchdog.py)."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Shares of the memory that are used.
TRAINER_ENDS_AT, SERVICE_ENDS_AT = 0.90, 0.95
GIB = 1 << 30

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
