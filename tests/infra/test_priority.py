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

from infra.priority import NICENESS, Busy, at_low_priority, cores, gpus
from tests.infra.rows import ROOT, run_python, running_python

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME")


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
