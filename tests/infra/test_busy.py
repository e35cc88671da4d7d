"""Who answers holds a lock, and lets go of it however it ends."""

import sys
from pathlib import Path

import pytest

from infra.busy import Busy
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
