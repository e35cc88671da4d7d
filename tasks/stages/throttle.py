"""Work beside the service: at low priority, and standing still while the service of this home answers."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from infra.busy import Busy
from infra.priority import at_low_priority
from infra.settings import load_settings
from models.core.learning.background_throttle import BackgroundThrottle
from tasks.stages.reporting import run_logger

TOLD_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def throttled(work: Callable[P, T]) -> Callable[P, T]:
    """Return `work`, run so that the service hardly notices it; an interrupt of the caller ends it."""

    @at_low_priority
    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        busy = Busy(load_settings().home)
        way = BackgroundThrottle(busy)
        try:
            with way:
                return work(*args, **kwargs)
        finally:
            busy.close()
            if way.waited_s >= TOLD_S:
                run_logger().info("stood still for %.0f s while the service answered", way.waited_s)

    return run
