"""What a log may hold of a failure, and tasks whose failures are told.

That is its class and where it happened, never its message, which may quote a request.
"""

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

# vLLM's processes read how to log from a file; theirs is as vLLM's own but for the messages of exceptions, and for what
# its handlers say of a request that they refuse, which quotes it.
VLLM_LOGGING = {"VLLM_LOGGING_CONFIG_PATH": str(Path(__file__).with_name("vllm_logging.json"))}

log = logging.getLogger(__name__)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PlainFormatter(logging.Formatter):
    """Formats records as any formatter, and exceptions without their messages."""

    def formatException(self, ei: _ExcInfo) -> str:
        return "" if ei[1] is None else place_of(ei[1])


def place_of(error: BaseException) -> str:
    """Return the class and the frames of an exception and of what caused it, the last one first."""
    lines, seen = list[str](), set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(f"{type(current).__module__}.{type(current).__qualname__}")
        frames = traceback.extract_tb(current.__traceback__)
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n".join(lines)


class BackgroundTasks:
    """Starts tasks, tells which of them failed, and ends them. None of them is expected to end by itself."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # by a task's name the class of the exception that ended it
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
