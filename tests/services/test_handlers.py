"""What a client is told of what vLLM refuses; the handlers themselves are driven in test_vllm_openai.py."""

import asyncio
from typing import Any
from unittest.mock import ANY

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from models.engines.vllm.openai import EngineStopped, Refused
from models.engines.vllm.tap import EngineEnded
from services.access import INTERNAL_ERROR, UNAVAILABLE, RequestError
from services.app import answered, from_error

pytestmark = pytest.mark.engine


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "anything", "param": param, "code": status}}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (error(400, "max_tokens is wrong", "max_tokens"), (400, "max_tokens is wrong", "max_tokens", None)),
        (error(400, "the maximum model length is 64"), (400, ANY, None, "context_length_exceeded")),
        (error(404, "no such model"), (404, "no such model", None, "model_not_found")),
        (error(501, "no tools", "tools"), (400, "no tools", "tools", "unsupported")),
        (error(501, ""), (400, "this is not served here", None, "unsupported")),
        (error(503, "overloaded"), (503, "overloaded", None, None)),
        (error(500, "secret of the server"), (500, INTERNAL_ERROR.message, None, "internal_error")),
        (error(400, "x" * 2000), (400, "x" * 1000, None, None)),
    ],
    ids=["wrong", "too long a prompt", "model", "unsupported", "silent", "overload", "failure", "long text"],
)
def test_an_error_of_the_engine_becomes_what_a_client_may_know_and_its_text_is_in_no_log(
    body: dict[str, Any], told: tuple[int, str, str | None, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = from_error(body)
    assert (refusal.status, refusal.message, refusal.param, refusal.code) == told
    assert "secret" not in caplog.text
    assert ("the engine failed on a request: anything, 500" in caplog.text) == (told[0] == 500)


def test_an_engine_that_ended_is_known_by_what_vllm_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    body = create_error_response(EngineEnded()).model_dump()
    body["error"]["message"] = "other words"
    told = from_error(body)
    assert (told.status, told.code, told.message) == (503, UNAVAILABLE.code, UNAVAILABLE.message)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("raised", "told"),
    [(Refused(error(400, "wrong")), (400, "wrong")), (EngineStopped(), (503, UNAVAILABLE.message))],
    ids=["refused", "stopped"],
)
def test_what_a_handler_raises_becomes_a_refusal(raised: Exception, told: tuple[int, str]) -> None:
    async def refuse() -> dict[str, Any]:
        raise raised

    with pytest.raises(RequestError) as refused:
        asyncio.run(answered(refuse(), {}))
    assert (refused.value.status, refused.value.message) == told


def test_tools_that_nobody_can_use_are_the_clients_fault_and_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> dict[str, Any]:
        raise error

    odd, tools = AttributeError("'str' object (what the client wrote"), {"tools": [{"type": "function"}]}
    with pytest.raises(RequestError) as refused:
        asyncio.run(answered(fail(odd), tools))
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert "AttributeError" in caplog.text
    assert "client wrote" not in caplog.text + refused.value.message
    with pytest.raises(AttributeError):
        asyncio.run(answered(fail(odd), {"response_format": {"type": "json_object"}}))
    with pytest.raises(RuntimeError):  # a failure of ours is never called the client's
        asyncio.run(answered(fail(RuntimeError("ours")), tools))
