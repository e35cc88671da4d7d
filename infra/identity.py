"""What tells a process from a later one that got its id."""

import os
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent's thread ends


def process_identity(pid: int) -> str | None:
    """Return what tells a process from a later one with the same id; None without such a process, or for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{process_place()} {fields[19]}"


def children_named(*names: str) -> dict[int, str]:
    """Return the ids of this process's children of some names, with their identities; none where there is no /proc."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            start, _, rest = file.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid, _, name = start.partition(" (")
        identity = process_identity(int(pid)) if name in names and int(rest.split()[1]) == os.getpid() else None
        if identity is not None:
            found[int(pid)] = identity
    return found


def process_place() -> str:
    """Return the boot and the pid namespace of this process: within one place, process ids mean the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
