"""Work that gives way: it runs in a thread of low priority, so that a service on the same cores hardly notices it.

Linux keeps a priority for each thread, and the threads that torch starts for it inherit it. A process that lowered its
own could not raise it again. Many kernels group processes by session, though, and a thread's priority then only counts
among the threads of its session: against a service in another one the whole session has to give way.
"""

import contextvars
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

# Beside threads that are always busy, about a tenth of a core is left: slow, but not starved as at 19.
NICENESS = 10

_AUTOGROUP = Path("/proc/self/autogroup")

P = ParamSpec("P")
T = TypeVar("T")


def lower_session() -> bool:
    """Let this session give way for good, if this process leads it and the kernel groups by session; return whether."""
    if os.getsid(0) != os.getpid() or not _AUTOGROUP.exists():
        return False
    _AUTOGROUP.write_text(str(NICENESS))
    return True


def at_low_priority(work: Callable[P, T]) -> Callable[P, T]:
    """Return `work`, run in a thread of low priority; the caller waits, and an interrupt of the caller ends it."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        result: Future[T] = Future()
        context = contextvars.copy_context()

        def body() -> None:
            try:
                number = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))
                result.set_result(context.run(work, *args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
                result.set_exception(error)

        thread = threading.Thread(target=body, name=f"at low priority: {work.__qualname__}")
        thread.start()
        try:
            return result.result()
        finally:
            if not result.done() and thread.ident is not None:
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), interrupt)
            thread.join()

    return run
