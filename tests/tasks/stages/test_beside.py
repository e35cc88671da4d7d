"""Work beside a service of the same home, with the real lock and real operations."""

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from infra.busy import Busy
from tasks.stages.beside import gently

BUSY_S = 1.5


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_work_stands_still_while_the_service_of_this_home_answers(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="redraft")
    service = Busy(home)
    service.tell(True)
    started_s = time.monotonic()
    threading.Timer(BUSY_S, service.tell, [False]).start()
    assert gently(lambda: float(torch.ones(4).sum()))() == 4.0
    assert BUSY_S <= time.monotonic() - started_s < 10 * BUSY_S
    assert any("stood still for" in record.message for record in caplog.records)


def test_errors_pass() -> None:
    def fails() -> None:
        raise ValueError("wanted rows")

    with pytest.raises(ValueError, match="wanted rows"):
        gently(fails)()
