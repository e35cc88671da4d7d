"""Prefect's `task`, which takes seconds to import, put off until a flow calls one. `tasks.stages` caches instead."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class task(Generic[P, R]):
    """A function that is a task where a flow calls it, and itself as `fn`."""

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(*args, **kwargs)

    @cached_property
    def _run(self) -> Callable[P, R]:
        import prefect
        from prefect.cache_policies import NO_CACHE

        name = "{stage}" if "stage" in signature(self.fn).parameters else None  # of one task for several stages
        return prefect.task(cache_policy=NO_CACHE, task_run_name=name)(self.fn)
