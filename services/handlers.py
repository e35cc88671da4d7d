"""What a client is told of what the engine's handlers refuse."""

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from models.engines.vllm.openai import Answer, EngineStopped, Refused
from models.engines.vllm.tap import EngineEnded
from services.access import INTERNAL_ERROR, RequestError
from services.failures import place_of

UNAVAILABLE = RequestError(503, "the engine is not running; it is being restarted", code="engine_unavailable")
NOT_IMPLEMENTED = 501
# What reading a tool's odd parameters fails with; anything else is a failure of ours.
ODD = (LookupError, AttributeError, RecursionError)

log = logging.getLogger(__name__)


async def answered(running: Awaitable[Answer], body: Mapping[str, Any]) -> Answer:
    """Return a handler's answer. What reads the parameters of a body's tools fails in more ways than it names.

    Raises:
        Refusal: what the handler refused.
    """
    try:
        return await running
    except Refused as error:
        raise from_error(error.body) from error
    except EngineStopped as error:
        raise UNAVAILABLE from error
    except ODD as error:
        if not body.get("tools"):
            raise
        log.warning("a request's tools could not be used: %s", place_of(error))
        raise RequestError(400, "tools can't be used as they are", "tools", "invalid_schema") from error


def from_error(body: dict[str, Any]) -> RequestError:
    """Turn the engine's error body into a Refusal; the text of a failure inside is left out.

    Such a failure is logged by its kind: the engine answers it as any other request, and nobody else tells of it.
    """
    error = body["error"]
    status, param = int(error["code"]), error.get("param")
    message = str(error["message"])[:1000]
    if status == NOT_IMPLEMENTED:
        return RequestError(400, message or "this is not served here", param, "unsupported")
    if status == EngineEnded.STATUS:
        return UNAVAILABLE
    if status >= 500 and status != 503:
        log.error("the engine failed on a request: %s, %d", error.get("type"), status)  # its text may quote the request
        return INTERNAL_ERROR
    code = None
    if "context length" in message or "maximum model length" in message:
        code = "context_length_exceeded"
    elif status == 404:
        code = "model_not_found"
    return RequestError(status, message, param, code)
