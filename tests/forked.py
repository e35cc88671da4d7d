"""Engines that a test starts in its own process are forks of one that has imported vLLM already.

vLLM starts its engine's process anew, and importing takes that process 15 s of a core: most of what a test with a tiny
model takes. What is imported is the same, and so is what the process then does. Services and commands, which tests
start as programs, start their engines as they do everywhere.
"""

import multiprocessing
import os
from multiprocessing import context
from typing import Any

PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "models.engines.vllm.worker",
    "models.engines.vllm.scheduler",
)


class Process(context.ForkServerProcess):
    """Has the environment of who starts it, not the older one of the process that it is a fork of."""

    def start(self) -> None:
        """See the base class."""
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """See the base class."""
        os.environ.clear()
        os.environ.update(self.environment)
        parent: Any = multiprocessing.parent_process()
        parent._pid = os.getppid()  # which ends with pytest; an engine ends with its parent
        super().run()


class Context(context.ForkServerContext):
    """Makes such processes."""

    Process: Any = Process


def fork_engines() -> None:
    """Let engines be started so from now on."""
    from vllm.v1.engine import utils

    made: Any = Context()
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    utils.get_mp_context = lambda: made  # type: ignore[assignment]
