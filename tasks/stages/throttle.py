"""Work beside the service: at low priority, and standing still while the service of this home answers on its device.

Low priority was not enough, most likely because threads of a matrix product wait for the last of them: one that lost
its core for some milliseconds holds up a whole step of the engine. Here the operations of torch look first whether
somebody is busy, and wait until nobody is. What runs beside an answer is at most the operation that had begun.

Beside a service that is never idle the work still has a share of a core: what it is owed grows with the time, and is
paid off in one go, because each time it goes on costs the others the same. It is paid in seconds of the processor: at
low priority a second in which the work may go on is one in which it gets a tenth of a core.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from infra.priority import Busy, at_low_priority, cores, gpus
from infra.settings import load_settings
from models.core.learning import distill
from models.params import BaseParams
from tasks.stages import run_logger

SHARE = 0.1  # of a core
MOST_OWED_S = 1.0  # of the processor; then it is paid
LOOK_S, POLL_S = 0.001, 0.003  # between two looks while it works, and while it waits
TOLD_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class Due:
    """What work that gives way is owed: it has to get a share of a core, whether others are busy or not."""

    def __init__(self) -> None:
        self._owed_s, self._paying = 0.0, False

    def waited(self, seconds: float) -> None:
        """Note that the work stood still."""
        self._owed_s += SHARE * seconds

    def worked(self, seconds: float, got_s: float) -> None:
        """Note that the work went on, and for how many seconds it got the processor; it can't work ahead."""
        self._owed_s = max(0.0, self._owed_s + SHARE * seconds - got_s)

    def must_go_on(self) -> bool:
        """Return whether the work is to go on now, whoever is busy."""
        self._paying = self._owed_s >= MOST_OWED_S or (self._paying and self._owed_s > 0)
        return self._paying


class BackgroundThrottle(TorchDispatchMode):
    """While it is entered, each operation of this thread waits its turn.

    Attributes:
        waited_s: seconds spent so.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take what says whether others are busy, asked before each operation, and what tells time and waits.

        `processor` says for how many seconds the process has computed.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.waited_s = 0.0
        self._busy, self._clock, self._processor, self._sleep = busy, clock, processor, sleep
        self._due, self._at_s, self._got_s = Due(), clock(), processor()
        self._looked_s = -LOOK_S

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait, and run the operation."""
        self.wait()
        return func(*args, **(kwargs or {}))

    def wait(self) -> None:
        """Return when the work may go on."""
        if self._clock() - self._looked_s < LOOK_S:
            return
        before_s, self._got_s = self._got_s, self._processor()
        seconds = self._passed()
        self._due.worked(seconds, min(seconds, self._got_s - before_s))
        while self._busy() and not self._due.must_go_on():
            self._sleep(POLL_S)
            seconds = self._passed()
            self.waited_s += seconds
            self._due.waited(seconds)
        self._looked_s, self._got_s = self._at_s, self._processor()

    def _passed(self) -> float:
        before, self._at_s = self._at_s, self._clock()
        return self._at_s - before


def device_of(params: BaseParams) -> str:
    """Return what a recipe's settings of training say to train on, or REDRAFT_DEVICE."""
    assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
    return params.device or load_settings().device


def throttled(work: Callable[P, T], device: str = "") -> Callable[P, T]:
    """Return `work`, run so that the service hardly notices it; an interrupt of the caller ends it.

    It gives way where the service runs on its cores or, if its device is a GPU, on that; by default REDRAFT_DEVICE.
    """

    @at_low_priority
    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        busy = Busy(load_settings().home)
        way, kind, _, number = BackgroundThrottle(busy), *(device or load_settings().device).partition(":")
        try:
            with way if busy.shares(cores() if kind == "cpu" else gpus(int(number or 0), 1)) else nullcontext():
                return work(*args, **kwargs)
        finally:
            busy.close()
            if way.waited_s >= TOLD_S:
                run_logger().info("stood still for %.0f s while the service answered", way.waited_s)

    return run
