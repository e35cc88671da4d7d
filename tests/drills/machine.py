"""What a machine tells the processes on it, as a drill wants it: its wall clock, and how much of its memory is used."""

import os
import struct
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Python runs a module of this name in every process that finds it.
MODULE = "sitecustomize.py"
CLOCK = """
import mmap, struct, time
with open({file!r}, "r+b") as _file:
    _page = mmap.mmap(_file.fileno(), 8)
_time, _time_ns = time.time, time.time_ns
_offset_s = lambda: struct.unpack("<q", _page[:8])[0]
time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
"""
MEMINFO = """
from pathlib import Path
_read_text = Path.read_text
def read_text(self, *args, **options):
    return _read_text(Path({file!r}) if str(self) == "/proc/meminfo" else self, *args, **options)
Path.read_text = read_text
"""
TOTAL_KB = 16 << 20


class Clock:
    """A wall clock that is off by what a file says."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump_to(0)
        self.code = CLOCK.format(file=str(file))

    def jump_to(self, offset_s: int) -> None:
        """Let it be off by so many seconds."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("<q", offset_s))


class Memory:
    """A machine of 16 GiB of which a share is used."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.use(0.5)
        self.code = MEMINFO.format(file=str(file))

    def use(self, share: float) -> None:
        """Let so much be used."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(f"MemTotal: {TOTAL_KB} kB\nMemAvailable: {int(TOTAL_KB * (1 - share))} kB\n")
        temporary.replace(self._file)


def seen_with(folder: Path, *parts: Clock | Memory) -> dict[str, str]:
    """Return the variables with which a process, and all that it starts, sees these instead of the machine's own."""
    (folder / MODULE).write_text("".join(part.code for part in parts))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH") or str(ROOT)]))}
