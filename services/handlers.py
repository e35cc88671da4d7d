"""vLLM's own OpenAI handlers over the engine: the one file of this folder that names vLLM's symbols.

They answer with a dict, or with server-sent events as text; what they refuse becomes a Refusal. vLLM's cancellation
decorator is left out on purpose: under Ray Serve it leaks the running generation, and Serve cancels the handler itself.
"""

from argparse import Namespace
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.v1.engine.exceptions import EngineDeadError

from models.engines.vllm import VllmEngine
from models.tokens import encode_chat
from services.access import INTERNAL_ERROR, Refusal

RequestT = TypeVar("RequestT", bound=BaseModel)
Answer = dict[str, Any] | AsyncGenerator[str, None]
REFUSABLE = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
UNAVAILABLE = Refusal(503, "the engine is not running; it is being restarted", code="engine_unavailable")
MAX_FAULTS = 3


class Handlers:
    """Chat, completion and models; made by `build`."""

    def __init__(self, state: State, tokenizer: Any) -> None:
        self._state, self.tokenizer = state, tokenizer
        self._markers = tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
        self._render_chat = state.online_renderer.render_chat
        state.online_renderer.render_chat = self._render_chat_with_plain_text

    @classmethod
    async def build(cls, engine: VllmEngine, tool_parser: str = "") -> "Handlers":
        """Build vLLM's handlers over a running engine; `tool_parser` is vLLM's name of one, "" takes no tools."""
        state = State()
        args = Namespace(**vars(engine.frontend_args))
        args.enable_auto_tool_choice, args.tool_call_parser = bool(tool_parser), tool_parser or None
        await init_app_state(engine.llm, state, args, await engine.llm.get_supported_tasks())
        return cls(state, engine.llm.renderer.tokenizer)

    async def chat(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/chat/completions; Refusal for whatever is not served."""
        request = _parse(ChatCompletionRequest, body)
        if request.tools and request.tool_choice == "auto" and not self._state.openai_serving_chat.enable_auto_tools:
            message = "tools are not taken here: the service was started without a tool_parser ([serve] in its recipe)"
            raise Refusal(400, message, "tools", "unsupported")
        return await _answer(self._state.openai_serving_chat.create_chat_completion(request, raw))

    async def complete(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/completions; Refusal for whatever is not served."""
        request = _parse(CompletionRequest, body)
        return await _answer(self._state.openai_serving_completion.create_completion(request, raw))

    async def models(self) -> dict[str, Any]:
        """Answer /v1/models."""
        return (await self._state.openai_serving_models.show_available_models()).model_dump()

    async def _render_chat_with_plain_text(self, request: ChatCompletionRequest, **options: Any) -> Any:
        """Render as vLLM does, but a template's marker inside a message stays text and can't close its turn."""
        rendered = await self._render_chat(request, **options)
        if isinstance(rendered, ErrorResponse):
            return rendered
        conversation, inputs = rendered
        contents = [message.get("content") or "" for message in conversation]
        if not any(marker in str(content) for content in contents for marker in self._markers):
            return rendered
        plain = all(isinstance(content, str) for content in contents) and request.add_generation_prompt
        if not plain or request.tools or request.chat_template_kwargs:
            raise Refusal(400, "a message holds one of the model's special tokens, which is not taken here", "messages")
        messages = [
            {"role": message["role"], "content": content}
            for message, content in zip(conversation, contents, strict=True)
        ]
        for engine_input in inputs:
            engine_input["prompt_token_ids"] = encode_chat(self.tokenizer, messages)
            engine_input.pop("prompt", None)
        return conversation, inputs


def as_refusal(error: Exception) -> Refusal | None:
    """Return what a client is told of an error; None if it is not the client's business."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EngineDeadError):
        return UNAVAILABLE
    if isinstance(error, NotImplementedError):
        return Refusal(400, str(error) or "this is not served here", code="unsupported")
    # A chat template that refuses its messages raises a class of jinja2, which is not ours to import.
    if not isinstance(error, REFUSABLE) and all(kind.__name__ != "TemplateError" for kind in type(error).__mro__):
        return None
    return from_error(create_error_response(error).model_dump())


def from_error(body: dict[str, Any]) -> Refusal:
    """Turn vLLM's error body into a Refusal; the text of a failure inside is left out."""
    error = body["error"]
    status = int(error["code"])
    if status >= 500 and status != 503:
        return INTERNAL_ERROR
    message = str(error["message"])[:1000]
    code = None
    if "context length" in message or "maximum model length" in message:
        code = "context_length_exceeded"
    elif status == 404:
        code = "model_not_found"
    return Refusal(status, message, error.get("param"), code)


def _parse(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        named = [
            (".".join(str(part) for part in fault["loc"] if "[" not in str(part)), fault["msg"]) for fault in faults
        ]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in named[:MAX_FAULTS])
        raise Refusal(400, message[:1000], named[0][0] or None) from error
    except REFUSABLE as error:
        raise (as_refusal(error) or INTERNAL_ERROR) from error


async def _answer(running: Any) -> Answer:
    try:
        answer = await running
    except Exception as error:
        if (refusal := as_refusal(error)) is None:
            raise
        raise refusal from error
    if isinstance(answer, ErrorResponse):
        raise from_error(answer.model_dump())
    return answer.model_dump() if isinstance(answer, BaseModel) else answer
