"""Lets an interrupt end the start of an engine.

While vLLM waits for the processes that it started it takes a `KeyboardInterrupt` for its own: it closes the socket that
they were to answer on, goes on, and waits ten minutes for them to be ready.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Interrupted(BaseException):
    """A `KeyboardInterrupt` that nobody catches on its way."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise the `KeyboardInterrupt` of a signal's handler out of the block, whatever the block does with it.

    What handlers do else is left to them. In other threads than the main one, where no handler runs, nothing changes.
    """
    former = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        former.clear()

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            former[signal.Signals(number)](number, frame)
        except KeyboardInterrupt as interrupt:
            raise _Interrupted from interrupt

    for number in former:
        signal.signal(number, handle)
    try:
        yield
    except _Interrupted as interrupted:
        raise KeyboardInterrupt from interrupted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
