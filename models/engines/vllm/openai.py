"""vLLM's own handlers over the engine: OpenAI's chat, completions, responses and models, Anthropic's messages, tokens.

They answer with a dict, or with server-sent events as text, in which a failure is the same frame for every API. vLLM's
cancellation decorator is left out on purpose: under Ray Serve it leaks the running generation, and Serve cancels the
handler itself.
"""

import json
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import vllm
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMError
from vllm.parser import ParserManager
from vllm.renderers.hf import resolve_chat_template

from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.grammars import Grammars
from models.engines.vllm.patches.renderer import require_guarded
from models.engines.vllm.tap import EngineEnded
from models.serving import Structured

RequestT = TypeVar("RequestT", bound=BaseModel)
Answer = dict[str, Any] | AsyncGenerator[str, None]
REFUSABLE = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
VERSION = vllm.__version__
MAX_FAULTS = 3
BEFORE_TOKENS = ("response.created", "response.in_progress")
ERROR_START = 'data: {"error"'  # of a frame that tells of a failure, as vLLM's chats write it
# What stands in chat templates that show the model how to write tool calls, all of a row, and the name of vLLM's parser
# of such calls; the first row that fits counts. What two of the parsers could mean is left out.
TOOL_MARKS = (
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "arguments"), "hermes"),
)

log = logging.getLogger(__name__)


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
    """What answers each path, by its API's own request; made by `build`."""

    def __init__(self, state: State, tokenizer: Any) -> None:
        self._state, self.tokenizer = state, tokenizer
        self._tokens, self._takes_tools = state.serving_tokenization, bool(state.args.enable_auto_tool_choice)
        model = state.vllm_config.model_config
        self._max_model_len: int = model.max_model_len
        self._most_chars: int = model.max_model_len * tokenizer.max_chars_per_token
        self._vocab_size: int = model.get_vocab_size()
        self._grammars: Grammars | None = state.engine_client.grammars

    @classmethod
    async def build(cls, engine: VllmEngine, tool_parser: str = "", structured: Structured | None = None) -> "Handlers":
        """Build vLLM's handlers over a running engine; when it is closed, what is started here ends.

        Without a tool parser no tools are taken, "auto" takes that of the chat template's calls; without `structured`
        all forms of answers are, unchecked. ValueError if vLLM renders chats of this model in a way of its own, which
        nothing guards.
        """
        require_guarded(engine.llm.renderer)
        if structured is not None:
            engine.llm.grammars = Grammars(engine.llm.vllm_config, structured)
        if tool_parser == "auto":
            tool_parser = _tool_parser(engine.llm.renderer)
        state = State()
        args = Namespace(**{**vars(FrontendArgs()), **vars(engine.args)})
        args.enable_auto_tool_choice, args.tool_call_parser = bool(tool_parser), tool_parser or None
        await init_app_state(engine.llm, state, args, await engine.llm.get_supported_tasks())
        return cls(state, engine.llm.renderer.tokenizer)

    async def chat(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/chat/completions; raises Refused or EngineStopped."""
        request = _parse(ChatCompletionRequest, body)
        _require_no_special_tokens(request)
        await self._require_possible(request)
        return _told(await _run(self._state.openai_serving_chat.create_chat_completion(request, raw)))

    async def complete(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/completions; raises what `chat` does."""
        request = _parse(CompletionRequest, body)
        await self._require_form(request)
        return _told(await _run(self._state.openai_serving_completion.create_completion(request, raw)))

    async def respond(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/responses, and store nothing, whatever the body says; raises what `chat` does."""
        own = {"request_id": f"resp_{raw.headers['x-request-id']}", "store": False}
        request = _parse(ResponsesRequest, body | own)
        await self._require_possible(request)
        try:
            answer = await _run(self._state.openai_serving_responses.create_responses(request, raw))
        except Refused as error:
            if error.body["error"].get("param") == "messages":  # as whatever renders a chat calls it
                error.body["error"]["param"] = "input"
            raise
        if isinstance(answer, BaseModel):
            return answer.model_dump(mode="json", by_alias=True)
        return _response_events(answer)

    async def message(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/messages as the chat that vLLM makes of it; raises what `chat` does."""
        serving = self._state.anthropic_serving_messages
        request = await self._as_chat(_parse(AnthropicMessagesRequest, body))
        request.priority = body.get("priority", 0)
        await self._require_possible(request)
        answer = await _run(serving.create_chat_completion(request, raw))
        if not isinstance(answer, ChatCompletionResponse):
            return _message_events(serving, answer)
        (choice,) = answer.choices
        whole = [call for call in choice.message.tool_calls if _is_object(call.function.arguments)]
        if choice.finish_reason == "tool_calls" and not whole:  # a client would wait for a call to answer
            choice.finish_reason = "stop"
        choice.message.tool_calls = whole  # one that a limit of tokens has cut has no arguments
        return dict(serving.messages_full_converter(answer).model_dump(exclude_none=True))

    async def count_tokens(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /v1/messages/count_tokens; raises what `chat` does."""
        request = _parse(AnthropicCountTokensRequest, body)
        await self._as_chat(request)  # what it can't make a chat of is refused
        return _told(await _run(self._state.anthropic_serving_messages.count_tokens(request, raw)))

    async def tokenize(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /tokenize, of a chat or a prompt; raises what `chat` does."""
        request: TokenizeChatRequest | TokenizeCompletionRequest
        if "messages" in body:
            request = _parse(TokenizeChatRequest, body)
            _require_no_special_tokens(request)
        else:
            request = _parse(TokenizeCompletionRequest, body)
            if (num_chars := len(request.prompt)) > self._most_chars:  # one thread encodes for all
                message = f"the prompt has {num_chars} characters; the context length takes {self._most_chars}"
                raise _refused(400, message, "prompt")
        return _told(await _run(self._tokens.create_tokenize(request, raw)))

    async def detokenize(self, body: dict[str, Any], raw: Request) -> Answer:
        """Answer /detokenize; raises what `chat` does."""
        request = _parse(DetokenizeRequest, body)
        if (num_tokens := len(request.tokens)) > self._max_model_len:  # one thread decodes for all
            message = f"there are {num_tokens} tokens; the context length is {self._max_model_len}"
            raise _refused(400, message, "tokens")
        if (largest := max(request.tokens, default=0)) >= self._vocab_size:
            raise _refused(400, f"token {largest} is not in the vocabulary of {self._vocab_size}", "tokens")
        return _told(await _run(self._tokens.create_detokenize(request, raw)))

    async def models(self) -> dict[str, Any]:
        """Answer /v1/models."""
        return dict((await self._state.openai_serving_models.show_available_models()).model_dump())

    async def _as_chat(self, request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> ChatCompletionRequest:
        """Return the chat that vLLM's handler makes of a request to /v1/messages; Refused if it makes none."""
        serving, thinking = self._state.anthropic_serving_messages, request.thinking
        is_off = thinking is not None and thinking.type == "disabled"
        effort = await serving._get_disabled_thinking_effort() if is_off else "none"
        try:
            return _made(
                AnthropicServingMessages.to_chat_completion_request,
                request,
                merge_inline_system=serving._merge_inline_system,
                disabled_thinking_effort=effort,
            )
        except AttributeError as error:  # a block's parts are not what it looks for
            raise _refused(400, "messages can't be used as they are", "messages") from error

    async def _require_possible(self, request: ChatCompletionRequest | ResponsesRequest) -> None:
        """Refuse tools that nothing could read the calls of, and what `_require_form` does."""
        if request.tools and request.tool_choice != "none" and not self._takes_tools:
            message = "tools are not taken here: no tool_parser is set, or none was found ([serve] in the recipe)"
            raise _refused(501, message, "tools")
        await self._require_form(request)

    async def _require_form(self, request: ChatCompletionRequest | CompletionRequest | ResponsesRequest) -> None:
        """Refuse here what a request itself names: before its tools are joined to it, which compiles in this loop."""
        if self._grammars is None:
            return
        try:
            if (wanted := request.extract_structured_outputs()) is not None:
                await self._grammars.require(wanted)
        except REFUSABLE as error:
            raise Refused(create_error_response(error).model_dump()) from error


def tool_parser_of(template: str) -> str:
    """Return the parser of the calls that a chat template shows, "" if it is none of TOOL_MARKS."""
    return next((name for marks, name in TOOL_MARKS if all(mark in template for mark in marks)), "")


def _tool_parser(renderer: Any) -> str:
    """Return vLLM's parser of the calls that the chat template shows, "" if there is none that can be used."""
    tokenizer = renderer.get_tokenizer()
    template = resolve_chat_template(tokenizer, None, [], model_config=renderer.model_config) or ""
    if not (name := tool_parser_of(template)):
        log.warning("tools are not taken: the chat template shows no calls that are known; set [serve] tool_parser")
        return ""
    try:
        ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    except TypeError as error:
        log.warning("tools are not taken: the chat template's calls are those of tool_parser %s: %s", name, error)
        return ""
    return name


def _parse(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    return _made(kind.model_validate, body)


def _made(make: Callable[..., RequestT], *args: Any, **options: Any) -> RequestT:
    """Return the request that vLLM makes of what a client sent; Refused with what it says against it."""
    try:
        return make(*args, **options)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        named = [
            (".".join(str(part) for part in fault["loc"] if "[" not in str(part)), fault["msg"]) for fault in faults
        ]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in named[:MAX_FAULTS])
        raise _refused(400, message, named[0][0] or None) from error
    except REFUSABLE as error:
        raise Refused(create_error_response(error).model_dump()) from error


async def _run(running: Awaitable[Any]) -> Any:
    """Return what a handler of vLLM's answers, or raise what it means by it."""
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
    return answer


def _told(answer: Any) -> Answer:
    return answer.model_dump() if isinstance(answer, BaseModel) else answer


async def _response_events(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    """Yield the events of a response as text; those before its first token with that, so that a refusal is a status."""
    held: list[str] = []
    try:
        async with aclosing(events):
            async for one in events:
                held.append(f"event: {one.type}\ndata: {one.model_dump_json(by_alias=True)}\n\n")
                if one.type in BEFORE_TOKENS:
                    continue
                for text in held:
                    yield text
                held.clear()
    except ValidationError:  # what vLLM makes of an answer that failed fits none of its events
        yield _error_frame(RuntimeError())
    except REFUSABLE as error:
        yield _error_frame(error)


async def _message_events(
    serving: AnthropicServingMessages, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Yield the events of a message that vLLM's handler makes of a chat's, whose errors it takes for its own."""
    failed: list[str] = []

    async def sound() -> AsyncGenerator[str, None]:
        async with aclosing(frames):
            async for frame in frames:
                if frame.startswith(ERROR_START):
                    failed.append(frame)
                    return
                yield frame

    async with aclosing(serving.message_stream_converter(sound())) as events:
        async for event in events:
            if event.startswith("event: error"):
                failed.append(_error_frame(RuntimeError()))
                break
            yield event
    for frame in failed[:1]:
        yield frame


def _error_frame(error: Exception) -> str:
    return f"data: {json.dumps(create_error_response(error).model_dump())}\n\n"


def _require_no_special_tokens(request: ChatCompletionRequest | TokenizeChatRequest) -> None:
    if request.add_special_tokens:
        message = "special tokens are the chat template's here; add_special_tokens is taken by /v1/completions"
        raise _refused(501, message, "add_special_tokens")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _refused(status: int, message: str, param: str | None) -> Refused:
    return Refused({"error": {"message": message, "param": param, "code": status}})
