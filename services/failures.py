"""What a log may hold of a failure: its class and where it happened, never its message, which may quote a request."""

import logging
import traceback
from pathlib import Path
from types import TracebackType

# vLLM's processes read how to log from a file; theirs is as vLLM's own but for the messages of exceptions, and for what
# its handlers say of a request that they refuse, which quotes it.
VLLM_LOGGING = {"VLLM_LOGGING_CONFIG_PATH": str(Path(__file__).with_name("vllm_logging.json"))}

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PlainFormatter(logging.Formatter):
    """Formats records as any formatter, and exceptions without their messages."""

    def formatException(self, ei: _ExcInfo) -> str:
        """Return an exception's classes and frames."""
        return "" if ei[1] is None else place_of(ei[1])


def place_of(error: BaseException) -> str:
    """Return the class and the frames of an exception and of what caused it, the last one first."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(f"{type(current).__module__}.{type(current).__qualname__}")
        frames = traceback.extract_tb(current.__traceback__)
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n".join(lines)
