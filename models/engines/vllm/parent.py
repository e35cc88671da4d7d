"""Lets an engine's process end when the one that started it does.

vLLM's own ends with its parent once it serves. While it starts, it notices nothing, and waits five minutes for a parent
that was killed before it first answered.
"""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process once its parent is gone.

    Args:
        parent: its process id; if it is not this process's parent any more, this process ends at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


class WithParent:
    """What an engine's process unpickles with its configuration, before it does anything: it ends with its parent."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Come out of a pickle as a call, in the process that reads it."""
        return _arrive, (os.getpid(),)

    def __deepcopy__(self, _: dict[int, Any]) -> "WithParent":
        """Return itself: a copy does not leave its process."""
        return self

    def compute_hash(self) -> str:
        """Return what vLLM names compiled code by: nothing of this is compiled."""
        return ""


def _arrive(sender: int) -> WithParent:
    # Whoever gets it from another process than its parent, such as over a network, has nothing to end with.
    if sender != os.getpid() and (sender == os.getppid() or not Path(f"/proc/{sender}").exists()):
        end_with(sender)
    return WithParent()
