"""Tasks that run in the event loop for as long as a service does."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from services.failures import place_of

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Starts tasks, tells which of them failed, and ends them. None of them is expected to end by itself.

    Attributes:
        failed: name of a task to the class of the exception that ended it. The log has where it was raised; its text
            is left out, because it may quote a request.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._running: list[asyncio.Task[None]] = []

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task; needs a running event loop."""
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._ended)
        self._running.append(task)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end, whatever it is."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed[task.get_name()] = type(error).__name__
            log.error("background task %s failed: %s", task.get_name(), place_of(error))
