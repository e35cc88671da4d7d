"""Work beside the service: at low priority, and standing still while the service of this home answers on its device."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

from infra.priority import Busy, at_low_priority, cores, gpus
from infra.settings import load_settings
from models.core.learning import distill
from models.core.learning.background_throttle import BackgroundThrottle
from models.params import BaseParams
from tasks.stages.task import run_logger

TOLD_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


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
