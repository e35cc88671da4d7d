"""The reading of a machine's memory, and of a container's."""

import threading
import time
from pathlib import Path

import pytest

from infra import memory
from infra.files import write_atomic
from infra.home import serving
from infra.memory import GIB, KILLED, PERIOD_S, MemoryUsage, Watchdog, free_memory_gib, own_gib, read_memory
from services.runner import RAY_VARIABLES
from tests.infra.rows import running_python

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
    found = read_memory()
    assert 0 < found.used < found.total
    assert 0 < free_memory_gib() < found.total / GIB


# A trainer with a child, whose machine has as much memory left as a file says.
TRAINER = """
import subprocess, sys, time
from pathlib import Path
from infra import home, memory
folder, reading = map(Path, sys.argv[1:])
memory.go_first()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
dog = memory.Watchdog(
    lambda: home.is_served(folder),
    lambda why: (folder / "why").write_text(why),
    lambda: memory.MemoryUsage(100, int(reading.read_text())),
)
with dog.watching():
    print(child.pid, Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip(), flush=True)
    time.sleep(60)
"""


def test_the_trainer_goes_first_then_the_service_and_ray_is_told_when() -> None:
    assert memory.TRAINER_ENDS_AT < memory.SERVICE_ENDS_AT < 1
    assert RAY_VARIABLES["RAY_memory_usage_threshold"] == str(memory.SERVICE_ENDS_AT)
    assert RAY_VARIABLES["RAY_worker_oom_score_adjustment"] == "0"  # by Ray's own the kernel would take the replica


@pytest.mark.slow
def test_a_trainer_ends_with_all_it_started_when_memory_is_short_beside_a_service(tmp_path: Path) -> None:
    def use(percent: str) -> None:
        write_atomic(tmp_path / "used", percent)

    use("99")
    with running_python(TRAINER, tmp_path, tmp_path / "used") as (trainer, told):
        child, score = told.split()
        assert int(score) == memory.FIRST_TO_GO
        time.sleep(3 * PERIOD_S)
        assert trainer.poll() is None  # there is nobody to make room for
        use("89")
        time.sleep(3 * PERIOD_S)
        with serving(tmp_path, "http://127.0.0.1:1"):
            use("91")
            assert trainer.wait(60) == KILLED
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()
    assert (tmp_path / "why").read_text() == "91% of 0.0 GiB are used, 90% may be"


@pytest.mark.slow
def test_last_words_that_hang_do_not_keep_the_process_from_its_end() -> None:
    ended = threading.Event()
    dog = Watchdog(lambda: True, lambda why: ended.wait(60), lambda: MemoryUsage(100, 95), ended.set)
    with dog.watching():
        assert ended.wait(30)


@pytest.mark.slow
def test_who_watches_knows_what_the_process_held_at_most() -> None:
    dog = Watchdog(lambda: True, read=lambda: MemoryUsage(100, 10))
    with dog.watching():
        held = bytearray(1 << 28)
        time.sleep(3 * PERIOD_S)
        before = own_gib()
        del held
    assert dog.peak_gib >= before - 0.05
    assert own_gib() < dog.peak_gib - 0.2
