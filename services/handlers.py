"""What a client is told of what the engine's handlers refuse."""

from collections.abc import Awaitable
from typing import Any

from models.engines.vllm.openai import Answer, EngineStopped, Refused
from services.access import INTERNAL_ERROR, Refusal

UNAVAILABLE = Refusal(503, "the engine is not running; it is being restarted", code="engine_unavailable")
NOT_IMPLEMENTED = 501


async def answered(running: Awaitable[Answer]) -> Answer:
    """Return a handler's answer; Refusal for what it refused."""
    try:
        return await running
    except Refused as error:
        raise from_error(error.body) from error
    except EngineStopped as error:
        raise UNAVAILABLE from error


def from_error(body: dict[str, Any]) -> Refusal:
    """Turn the engine's error body into a Refusal; the text of a failure inside is left out."""
    error = body["error"]
    status, param = int(error["code"]), error.get("param")
    message = str(error["message"])[:1000]
    if status == NOT_IMPLEMENTED:
        return Refusal(400, message or "this is not served here", param, "unsupported")
    if status >= 500 and status != 503:
        return INTERNAL_ERROR
    code = None
    if "context length" in message or "maximum model length" in message:
        code = "context_length_exceeded"
    elif status == 404:
        code = "model_not_found"
    return Refusal(status, message, param, code)
