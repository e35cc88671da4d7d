"""A task of Prefect's, and what one shows while it runs: log lines, progress and tables in its UI, a bar on a terminal.

Prefect takes seconds to import, so that waits until a flow calls a task. Outside a run (a task called through `.fn`)
only the log is written. `tasks.stages` caches instead of Prefect.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, update_wrapper
from inspect import signature
from typing import Generic, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

from tqdm import tqdm

P = ParamSpec("P")
R = TypeVar("R")
# Stage to key of what a plan found made; None where there is no plan, and steps are run.
PLANNED: ContextVar[dict[str, str] | None] = ContextVar("planned", default=None)


class task(Generic[P, R]):
    """A function that is a task where a flow calls it, and itself as `fn`."""

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._run if PLANNED.get() is None else self.fn)(*args, **kwargs)

    @cached_property
    def _run(self) -> Callable[P, R]:
        import prefect
        from prefect.cache_policies import NO_CACHE

        name = "{stage}" if "stage" in signature(self.fn).parameters else None  # of one task for several stages
        return prefect.task(cache_policy=NO_CACHE, task_run_name=name)(self.fn)


UPDATE_S = 2.0
LINE_S = 30.0  # where there is no terminal, a line now and then is all that shows life


class Show(Protocol):
    """Takes how much is done of how much, and a note."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def run_logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the run's logger."""
    if not _in_run():
        return logging.getLogger("redraft")
    from prefect.logging import get_run_logger

    return get_run_logger()


def flow_run_id() -> str:
    """Return the id of the flow run, empty outside one."""
    if not _in_run():
        return ""
    from prefect.runtime import flow_run

    return str(flow_run.id or "")


def name_run(name: str) -> None:
    """Name the flow run by what it does or did; outside one nothing happens."""
    if run_id := flow_run_id():
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(run_id), name=name)


@contextmanager
def progress(description: str) -> Iterator[Show]:
    """Yield a function that shows how far the task is, each note after what is being done."""
    artifact_id = None
    if _in_run():
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        # Prefect's functions are typed for both worlds; called outside a loop they have done their work.
        artifact_id = cast("UUID", create_progress_artifact(0.0, description=description))
    shown_s, line_s = -UPDATE_S, time.monotonic()
    with tqdm(desc=description, total=0, unit_scale=True, disable=None, leave=False) as bar:

        def show(done: float, total: float, note: str = "") -> None:
            nonlocal shown_s, line_s
            bar.total = total
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)
            now_s = time.monotonic()
            if artifact_id is not None and (now_s - shown_s >= UPDATE_S or done >= total):
                shown_s = now_s
                update_progress_artifact(artifact_id, 100 * done / max(total, 1), f"{description}: {note}")
            if bar.disable and now_s - line_s >= LINE_S:
                line_s = now_s
                run_logger().info("%s: %d of %d%s", description, done, total, f", {note}" if note else "")

        yield show


def table(key: str, rows: Sequence[Mapping[str, object]], description: str) -> None:
    """Log a table and show it in the UI, under a key of small letters, digits and dashes."""
    lines = ["  ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    run_logger().info("%s\n  %s", description, "\n  ".join(lines))
    if _in_run():
        from prefect.artifacts import create_table_artifact

        create_table_artifact([dict(row) for row in rows], key=key, description=description)


def _in_run() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
