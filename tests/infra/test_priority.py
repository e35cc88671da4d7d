import contextvars
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import priority
from infra.files import write_atomic
from infra.home import serving
from infra.priority import (
    GIB,
    KILLED,
    NICENESS,
    PERIOD_S,
    Busy,
    MemoryUsage,
    Watchdog,
    at_low_priority,
    cores,
    free_memory_gib,
    gpus,
    own_gib,
    read_memory,
)
from services.runner import RAY_VARIABLES
from tests.infra.rows import ROOT, run_python, running_python

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME")
MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n"


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_and_its_threads_run_at_low_priority_and_the_caller_stays_as_it_is() -> None:
    def in_a_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(niceness).result()

    before = niceness()
    for work in (niceness, at_low_priority(niceness), in_a_thread):
        assert at_low_priority(work)() == max(before, NICENESS)
    assert niceness() == before


def test_who_leads_a_session_lowers_all_of_it_and_who_was_started_in_one_does_not() -> None:
    script = "from infra.priority import lower_session; print(lower_session(), open('/proc/self/autogroup').read())"
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel doesn't group processes by session")
    own = Path("/proc/self/autogroup").read_text()
    argv = [sys.executable, "-c", script]
    told = subprocess.run(argv, start_new_session=True, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert re.fullmatch(rf"True /autogroup-\d+ nice {NICENESS}\s*", told)
    assert run_python(script).stdout.startswith("False")
    assert Path("/proc/self/autogroup").read_text() == own


def test_arguments_context_and_errors_pass_through() -> None:
    NAME.set("run 7")
    assert at_low_priority(lambda left, right: (left, right, NAME.get()))(1, right=2) == (1, 2, "run 7")
    with pytest.raises(ValueError, match="wanted a draft"):
        at_low_priority(lambda: (_ for _ in ()).throw(ValueError("wanted a draft")).__next__())()


def test_an_interrupted_caller_ends_the_work_and_waits_for_it() -> None:
    ended = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append(True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            at_low_priority(work)()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended == [True]


def test_who_looks_sees_what_another_tells_and_not_its_own(tmp_path: Path) -> None:
    service, trainer, watch = (Busy(tmp_path) for _ in range(3))
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]  # only the user may read it
    assert not trainer()
    service.tell(True)
    assert trainer()
    assert watch()
    assert not service()
    service.tell(True)
    service.tell(False)
    assert not trainer()


def test_a_service_that_is_killed_answers_nobody(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from infra.priority import Busy\n"
    script += "busy = Busy(Path(sys.argv[1])); busy.tell(True); print('told', flush=True); time.sleep(60)"
    looks = Busy(tmp_path)
    with running_python(script, tmp_path) as (_, told):
        assert told == "told"
        assert looks()
    assert not looks()


def test_who_looks_learns_what_the_service_runs_on(tmp_path: Path) -> None:
    service, trainer = Busy(tmp_path), Busy(tmp_path)
    assert trainer.shares(gpus(1, 1))  # of a service that did not say
    service.occupy({"core 0", "core 12"} | gpus(0, 2))
    service.occupy({"core 0"} | gpus(0, 1))
    assert trainer.shares({"core 0", "core 1"}) and trainer.shares(gpus(0, 1))
    assert not trainer.shares({"core 1", "core 12"}) and not trainer.shares(gpus(1, 1))


def test_gpus_have_the_same_name_whatever_a_process_sees_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(1, 2) == {"gpu 1", "gpu 2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-8932f937")
    assert gpus(0, 2) == {"gpu 2", "gpu GPU-8932f937"}
    assert cores() == {f"core {number}" for number in os.sched_getaffinity(0)}


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
from infra import home, priority
folder, reading = map(Path, sys.argv[1:])
priority.go_first()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
dog = priority.Watchdog(
    lambda: home.is_served(folder),
    lambda why: (folder / "why").write_text(why),
    lambda: priority.MemoryUsage(100, int(reading.read_text())),
)
with dog.watching():
    print(child.pid, Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip(), flush=True)
    time.sleep(60)
"""


def test_the_trainer_goes_first_then_the_service_and_ray_is_told_when() -> None:
    assert priority.TRAINER_ENDS_AT < priority.SERVICE_ENDS_AT < 1
    assert RAY_VARIABLES["RAY_memory_usage_threshold"] == str(priority.SERVICE_ENDS_AT)
    assert RAY_VARIABLES["RAY_worker_oom_score_adjustment"] == "0"  # by Ray's own the kernel would take the replica


@pytest.mark.slow
def test_a_trainer_ends_with_all_it_started_when_memory_is_short_beside_a_service(tmp_path: Path) -> None:
    def use(percent: str) -> None:
        write_atomic(tmp_path / "used", percent)

    use("99")
    with running_python(TRAINER, tmp_path, tmp_path / "used") as (trainer, told):
        child, score = told.split()
        assert int(score) == priority.FIRST_TO_GO
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
