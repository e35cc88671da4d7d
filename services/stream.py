"""Server-sent events on their way out: a failure before the first is a status, one after it is an error frame.

A stream always ends with `[DONE]` or an error frame, so a client can tell a complete answer from a cut one.
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from services.access import INTERNAL_ERROR, RequestError
from services.failures import place_of

DATA = "data: "
ERROR_START = 'data: {"error"'
DONE = "data: [DONE]\n\n"

log = logging.getLogger(__name__)


async def opened(
    frames: AsyncGenerator[str, None],
    refuse: Callable[[dict[str, Any]], RequestError],
    usage: Callable[[], dict[str, Any] | None],
    closed: Callable[[], None],
) -> AsyncGenerator[str, None]:
    """Wait for the first frame, then return the stream.

    `refuse` turns the body of an error frame into what the client is told, which is raised if it is the first; `usage`
    is added to the chunk that carries the usage; `closed` is called once, when the stream ended or the client left.
    """
    try:
        first = await anext(frames)
    except BaseException:
        closed()
        raise
    if first.startswith(ERROR_START):
        closed()
        raise refuse(json.loads(first.removeprefix(DATA)))

    async def rest() -> AsyncGenerator[str, None]:
        try:
            yield first
            async for frame in frames:
                if frame.startswith(ERROR_START):
                    frame = event(refuse(json.loads(frame.removeprefix(DATA))).body())
                elif '"choices":[]' in frame:
                    frame = _with_usage(frame, usage())
                yield frame
        except Exception as error:  # noqa: BLE001 - the status is long sent; the frame is the only way left to say it
            log.error("a stream failed: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
            yield event(INTERNAL_ERROR.body())
            yield DONE
        finally:
            await frames.aclose()  # a client that left: the engine stops at once
            closed()

    return rest()


def _with_usage(frame: str, speculation: dict[str, Any] | None) -> str:
    chunk = json.loads(frame.removeprefix(DATA))
    if speculation is not None and isinstance(chunk.get("usage"), dict):
        chunk["usage"]["redraft"] = speculation
    return event(chunk)


def event(body: dict[str, Any]) -> str:
    return f"{DATA}{json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"
