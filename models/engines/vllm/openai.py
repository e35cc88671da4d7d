"""vLLM's own OpenAI handlers over the engine: chat, completions and models.

They answer with a dict, or with server-sent events as text. vLLM's cancellation decorator is left out on purpose: under
Ray Serve it leaks the running generation, and Serve cancels the handler itself.
"""

from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError

from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.grammars import Grammars
from models.engines.vllm.patches.renderer import require_guarded
from models.engines.vllm.tap import EngineEnded
from models.serving import Structured

RequestT = TypeVar("RequestT", bound=BaseModel)
Answer = dict[str, Any] | AsyncGenerator[str, None]
REFUSABLE = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
MAX_FAULTS = 3


class Refused(Exception):
    """A request that vLLM does not take, or failed on.

    `body` is what vLLM answers: {"error": {"message", "param", "code"}}, with an HTTP status as code, 501 for what is
    not supported here.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body["error"]["message"])
        self.body = body


class EngineStopped(RuntimeError):
    """The engine's processes are gone."""


class Handlers:
    """Chat, completion and models; made by `build`."""

    def __init__(self, state: State, tokenizer: Any) -> None:
        self._state, self.tokenizer = state, tokenizer
        self._grammars: Grammars | None = state.engine_client.grammars

    @classmethod
    async def build(cls, engine: VllmEngine, tool_parser: str = "", structured: Structured | None = None) -> "Handlers":
        """Build vLLM's handlers over a running engine; when it is closed, what is started here ends.

        Without a tool parser no tools are taken; without `structured` all forms of answers are, unchecked. ValueError
        if vLLM renders chats of this model in a way of its own, which nothing guards.
        """
        require_guarded(engine.llm.renderer)
        if structured is not None:
            engine.llm.grammars = Grammars(engine.llm.vllm_config, structured)
        state = State()
        args = Namespace(**{**vars(FrontendArgs()), **vars(engine.args)})
        args.enable_auto_tool_choice, args.tool_call_parser = bool(tool_parser), tool_parser or None
        await init_app_state(engine.llm, state, args, await engine.llm.get_supported_tasks())
        return cls(state, engine.llm.renderer.tokenizer)

    async def chat(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/chat/completions; raises Refused or EngineStopped."""
        request = _parse(ChatCompletionRequest, body)
        if request.tools and request.tool_choice == "auto" and not self._state.openai_serving_chat.enable_auto_tools:
            message = "tools are not taken here: the service was started without a tool_parser ([serve] in its recipe)"
            raise _refused(501, message, "tools")
        if request.add_special_tokens:
            message = "special tokens are the chat template's here; add_special_tokens is taken by /v1/completions"
            raise _refused(501, message, "add_special_tokens")
        await self._require_form(request)
        return await _answer(self._state.openai_serving_chat.create_chat_completion(request, raw))

    async def complete(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/completions; raises what `chat` does."""
        request = _parse(CompletionRequest, body)
        await self._require_form(request)
        return await _answer(self._state.openai_serving_completion.create_completion(request, raw))

    async def models(self) -> dict[str, Any]:
        """Answer /v1/models."""
        return dict((await self._state.openai_serving_models.show_available_models()).model_dump())

    async def _require_form(self, request: ChatCompletionRequest | CompletionRequest) -> None:
        """Refuse here what a request itself names: before its tools are joined to it, which compiles in this loop."""
        if self._grammars is None:
            return
        try:
            if (wanted := request.extract_structured_outputs()) is not None:
                await self._grammars.require(wanted)
        except REFUSABLE as error:
            raise Refused(create_error_response(error).model_dump()) from error


def _parse(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        named = [
            (".".join(str(part) for part in fault["loc"] if "[" not in str(part)), fault["msg"]) for fault in faults
        ]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in named[:MAX_FAULTS])
        raise _refused(400, message, named[0][0] or None) from error
    except REFUSABLE as error:
        raise Refused(create_error_response(error).model_dump()) from error


async def _answer(running: Awaitable[Any]) -> Answer:
    try:
        answer = await running
    except EngineEnded as error:
        raise EngineStopped("the engine is not running") from error
    except Exception as error:
        # A chat template that refuses its messages raises a class of jinja2, which is not ours to import.
        if isinstance(error, REFUSABLE) or any(kind.__name__ == "TemplateError" for kind in type(error).__mro__):
            raise Refused(create_error_response(error).model_dump()) from error
        raise
    if isinstance(answer, ErrorResponse):
        raise Refused(answer.model_dump())
    return answer.model_dump() if isinstance(answer, BaseModel) else answer


def _refused(status: int, message: str, param: str | None) -> Refused:
    return Refused({"error": {"message": message, "param": param, "code": status}})
