"""Who answers holds a lock, and lets go of it however it ends."""

import os
import sys
from pathlib import Path

import pytest

from infra.busy import Busy, cores, gpus
from tests.infra.rows import running_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks of open files are Linux's")


def test_who_looks_sees_what_another_tells_and_not_its_own(tmp_path: Path) -> None:
    service, trainer, watch = (Busy(tmp_path) for _ in range(3))
    assert not trainer()
    service.tell(True)
    assert trainer()
    assert watch()
    assert not service()
    service.tell(True)
    service.tell(False)
    assert not trainer()


def test_a_service_that_is_killed_answers_nobody(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from infra.busy import Busy\n"
        "busy = Busy(Path(sys.argv[1])); busy.tell(True); print('told', flush=True); time.sleep(60)"
    )
    looks = Busy(tmp_path)
    with running_python(script, tmp_path) as (_, told):
        assert told == "told"
        assert looks()
    assert not looks()


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    Busy(tmp_path).close()
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]


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
