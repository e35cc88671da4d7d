"""Work beside a service of the same home, with the real lock and real operations."""

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infra.priority import Busy, cores, gpus
from tasks.stages.throttle import LOOK_S, MOST_OWED_S, POLL_S, SHARE, BackgroundThrottle, Due, throttled


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


class Moments:
    """A clock that a sleep and each operation set forward, and a service that is busy at times.

    An operation takes 10 ms of the processor, and longer where it gets a part of a core only.
    """

    def __init__(self, busy_from_s: float = 0.0, busy_to_s: float = 0.0, core: float = 1.0) -> None:
        self.busy_from_s, self.busy_to_s, self.core = busy_from_s, busy_to_s, core
        self.now_s = self.got_s = self.slept_s = 0.0
        self.way = BackgroundThrottle(
            lambda: self.busy_from_s <= self.now_s < self.busy_to_s, lambda: self.now_s, lambda: self.got_s, self.sleep
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def work(self, until_s: float) -> float:
        """Work until a time; return the seconds that operations took."""
        before_s = self.got_s
        while self.now_s < until_s:
            self.way.wait()
            self.now_s += 0.01 / self.core
            self.got_s += 0.01
        return self.got_s - before_s


def ticking(seconds: float = 1.0) -> Callable[[], float]:
    """Return a clock that goes on by so much each time that it is read."""
    moments = itertools.count()
    return lambda: seconds * next(moments)


def test_it_stands_still_while_others_are_answered_and_goes_on_when_they_were() -> None:
    moments = Moments(busy_from_s=1.0, busy_to_s=3.0)
    assert moments.work(1.0) == pytest.approx(1.0)
    moments.way.wait()
    assert moments.now_s == pytest.approx(3.0, abs=2 * POLL_S)
    assert moments.way.waited_s == pytest.approx(moments.slept_s)


@pytest.mark.parametrize("core", [1.0, 0.2, SHARE])
def test_beside_a_service_that_is_never_idle_it_gets_its_share_of_the_processor(core: float) -> None:
    assert Moments(busy_to_s=1e9, core=core).work(400.0) == pytest.approx(SHARE * 400.0, rel=0.1)


def test_what_it_gets_between_answers_counts() -> None:
    moments, worked_s = Moments(), 0.0
    for second in range(0, 100, 2):  # a second of every two is idle: nothing is ever due
        moments.busy_from_s, moments.busy_to_s = second + 1.0, second + 2.0
        worked_s += moments.work(second + 1.0)
        moments.way.wait()
    assert worked_s == pytest.approx(50, rel=0.02)
    assert moments.slept_s == pytest.approx(50, rel=0.02)


def test_what_is_owed_is_paid_off_in_one_go() -> None:
    due = Due()
    due.waited(MOST_OWED_S / SHARE - 0.1)
    assert not due.must_go_on()
    due.waited(0.2)
    assert due.must_go_on()
    due.worked(MOST_OWED_S / 2, MOST_OWED_S / 2)
    assert due.must_go_on()
    due.worked(MOST_OWED_S, MOST_OWED_S)
    assert not due.must_go_on()


def test_every_operation_waits_in_training_too_and_none_is_changed() -> None:
    def trained() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(8, 8, generator=generator).requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(3):
            loss = (torch.randn(4, 8, generator=generator) @ weight).softmax(-1).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    before, looked = trained(), []
    with BackgroundThrottle(lambda: bool(looked.append(1)), clock=ticking()):
        after = trained()
    assert len(looked) > 3 * 10
    assert torch.equal(before, after)


def test_what_runs_backward_waits_as_well() -> None:
    weight, looked = torch.randn(4, 4, requires_grad=True), []
    loss = (weight @ weight).sum()
    with BackgroundThrottle(lambda: bool(looked.append(1)), clock=ticking()):
        loss.backward()
    assert len(looked) >= 3


def test_it_looks_no_more_often_than_it_needs_to() -> None:
    looked = []
    with BackgroundThrottle(lambda: bool(looked.append(1)), clock=ticking(LOOK_S / 10)):
        for _ in range(200):
            torch.ones(2).sum()
    assert 20 <= len(looked) <= 200
