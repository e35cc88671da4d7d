"""Work beside a service of the same home, with the real lock and real operations."""

import logging
import threading
from pathlib import Path

import pytest
import torch

from infra.priority import Busy, cores, gpus
from tasks.stages.throttle import throttled


@pytest.fixture
def service(home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Busy:
    """What tells that the service of this home answers; a wait of 10 ms is told."""
    caplog.set_level(logging.INFO, logger="redraft")
    monkeypatch.setattr("tasks.stages.throttle.TOLD_S", 0.01)
    return Busy(home)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "runs_on"), [("cpu", cores()), ("cuda", gpus(0, 1)), ("cuda:1", gpus(0, 2))])
def test_work_stands_still_while_the_service_of_this_home_answers_on_its_cores_or_its_gpu(
    service: Busy, caplog: pytest.LogCaptureFixture, device: str, runs_on: set[str]
) -> None:
    order = list[str]()
    service.occupy(runs_on)

    def answered() -> None:
        order.append("the service answered")
        service.tell(False)

    def work() -> float:
        threading.Timer(0.5, answered).start()
        total = float(torch.ones(4).sum())
        order.append("the work went on")
        return total

    service.tell(True)
    assert throttled(work, device)() == 4.0
    assert order == ["the service answered", "the work went on"]
    assert "stood still for" in caplog.text


@pytest.mark.parametrize(
    ("device", "runs_on"), [("cpu", {"core 9999"}), ("cuda:1", cores() | gpus(0, 1)), ("cuda", gpus(1, 1))]
)
def test_work_that_shares_neither_cores_nor_a_gpu_with_the_service_does_not_wait(
    service: Busy, caplog: pytest.LogCaptureFixture, device: str, runs_on: set[str]
) -> None:
    service.occupy(runs_on)
    service.tell(True)  # and never ends
    assert throttled(lambda: float(torch.ones(4).sum()), device)() == 4.0
    assert "stood still" not in caplog.text
