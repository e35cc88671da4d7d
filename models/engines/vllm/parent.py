"""Lets an engine's process end when the one that started it does.

vLLM's own ends with its parent once it serves. While it starts, it notices nothing, and waits five minutes for a parent
that was killed before it first answered.
"""

import ctypes
import multiprocessing
import os
import signal
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process once its parent is gone; in a process that is nobody's child, do nothing."""
    if (parent := multiprocessing.parent_process()) is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it went before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


class WithParent:
    """What an engine's process unpickles with its configuration, before it does anything: see `end_with_parent`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Come out of a pickle as a call, in the process that reads it."""
        return _arrive, ()

    def __deepcopy__(self, _: dict[int, Any]) -> "WithParent":
        """Return itself: a copy does not leave its process."""
        return self

    def compute_hash(self) -> str:
        """Return what vLLM names compiled code by: nothing of this is compiled."""
        return ""


def _arrive() -> WithParent:
    end_with_parent()
    return WithParent()
