"""Server-sent events on their way out: a failure before the first is a status, one after it is an error frame.

A stream always ends with `[DONE]`, with its API's last event or with an error frame, so a client can tell a complete
answer from a cut one. The APIs differ in which event has the usage and how an error is told; whatever answers says an
error as chats do, and it is told here as the stream's API does.
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from services.access import INTERNAL_ERROR, MESSAGES, RequestError
from services.failures import place_of
from services.questions import RESPONSES

DATA = "data: "
ERROR_START = 'data: {"error"'
DONE = "data: [DONE]\n\n"
# What the event with the usage has, and no text of an answer could: quotes and ends of lines are escaped in it.
CHAT_USAGE = '"choices":[]'
USAGE_EVENTS = {RESPONSES: "event: response.completed\n", MESSAGES: "event: message_delta\n"}

log = logging.getLogger(__name__)


async def opened(
    frames: AsyncGenerator[str, None],
    refuse: Callable[[dict[str, Any]], RequestError],
    usage: Callable[[], dict[str, Any] | None],
    closed: Callable[[], None],
    path: str = "",
) -> AsyncGenerator[str, None]:
    """Wait for the first frame, then return the stream.

    `refuse` turns the body of an error frame into what the client is told, which is raised if it is the first; `usage`
    is added to the event that carries the usage; `closed` is called once, when the stream ended or the client left.
    `path` is the API's.
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
        num_sent, has_usage = 1, USAGE_EVENTS.get(path, CHAT_USAGE)
        try:
            yield first
            async for frame in frames:
                if frame.startswith(ERROR_START):
                    frame = _error(refuse(json.loads(frame.removeprefix(DATA))), path, num_sent)
                elif has_usage in frame:
                    frame = _with_usage(frame, usage())
                yield frame
                num_sent += 1
        except Exception as error:  # noqa: BLE001 - the status is long sent; the frame is the only way left to say it
            log.error("a stream failed: %s", place_of(error))  # noqa: TRY400 - as in services/access.py
            yield _error(INTERNAL_ERROR, path, num_sent)
            if path not in USAGE_EVENTS:
                yield DONE
        finally:
            await frames.aclose()  # a client that left: the engine stops at once
            closed()

    return rest()


def _error(refusal: RequestError, path: str, number: int) -> str:
    """Return an error as an event of a path's stream; of a response's stream each event has a number."""
    if path == RESPONSES:
        told = {"code": refusal.code, "message": refusal.message, "param": refusal.param, "sequence_number": number}
        return f"event: error\n{event({'type': 'error', **told})}"
    return ("event: error\n" if path in USAGE_EVENTS else "") + event(refusal.body(path))


def _with_usage(frame: str, speculation: dict[str, Any] | None) -> str:
    name, _, data = frame.partition(DATA)
    body = json.loads(data)
    told = body.get("response", body)
    if speculation is not None and isinstance(told.get("usage"), dict):
        told["usage"]["redraft"] = speculation
    return name + event(body)


def event(body: dict[str, Any]) -> str:
    return f"{DATA}{json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"
