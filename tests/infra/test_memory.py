"""The reading of a machine's memory, and of a container's."""

from pathlib import Path

from infra.memory import GIB, MemoryUsage, free_memory_gib, read_memory

MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n"


def test_the_reading_is_that_of_a_container_where_that_is_the_tighter_one(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(MEMINFO.format(total=8 << 20, free=6 << 20))
    (cgroup / "memory").mkdir(parents=True)
    assert read_memory(meminfo, cgroup) == MemoryUsage(8 * GIB, 2 * GIB)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\nactive_file 0\n")
    assert read_memory(meminfo, cgroup) == MemoryUsage(8 * GIB, 2 * GIB)
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    tight = read_memory(meminfo, cgroup)
    assert (tight, tight.share, round(tight.room_gib, 3)) == (MemoryUsage(4 * GIB, 2 * GIB), 0.5, 1.6)
    for name in ("memory.max", "memory.current", "memory.stat"):
        (cgroup / name).unlink()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text(f"{4 * GIB}\n")
    (cgroup / "memory" / "memory.stat").write_text(f"total_inactive_file {GIB}\ntotal_active_file 0\n")
    assert read_memory(meminfo, cgroup) == MemoryUsage(4 * GIB, 3 * GIB)


def test_this_machine_has_memory() -> None:
    memory = read_memory()
    assert 0 < memory.used < memory.total
    assert 0 < free_memory_gib() < memory.total / GIB
