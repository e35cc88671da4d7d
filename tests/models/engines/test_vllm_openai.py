"""Tool calls through the engine's own handlers, and answers that the engine breaks off."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from models.engines.vllm import tool_parsers
from models.engines.vllm.openai import TOOL_MARKS, EngineStopped, Handlers, Refused, tool_parser_of
from models.engines.vllm.tap import EngineEnded
from models.serving import Structured

pytestmark = pytest.mark.engine

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL, FLAT_TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
MESSAGE_TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
}
RESPONSE = {"model": "target", "input": "add 1", "max_output_tokens": 100}
MESSAGE = {"model": "target", "messages": [{"role": "user", "content": "add 1"}], "max_tokens": 100}
BODIES: dict[str, dict[str, Any]] = {"chat": MESSAGE, "respond": RESPONSE, "message": MESSAGE}


def asked(**options: Any) -> dict[str, Any]:
    """A request whose answer is fixed by a grammar, because the target has random weights."""
    return MESSAGE | {"structured_outputs": {"choice": [CALL]}, **options}


def request() -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", b"f" * 32)]})


async def ask(handlers: Handlers, body: dict[str, Any], api: str = "chat") -> dict[str, Any]:
    answer = await getattr(handlers, api)(body, request())
    assert isinstance(answer, dict)
    return answer


async def frames(handlers: Handlers, body: dict[str, Any], api: str = "chat") -> list[str]:
    answer = await getattr(handlers, api)(body | {"stream": True}, request())
    assert not isinstance(answer, dict), answer
    return [frame async for frame in answer]


async def events(handlers: Handlers, body: dict[str, Any], api: str) -> list[dict[str, Any]]:
    return [json.loads(frame.partition("data: ")[2]) for frame in await frames(handlers, body, api)]


async def test_what_the_target_writes_as_a_call_is_parsed_as_the_recipe_says(engine: Any) -> None:
    handlers = await Handlers.build(engine, "hermes")
    (choice,) = (await ask(handlers, asked(tools=[TOOL])))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = (await ask(handlers, asked()))["choices"]
    assert choice["message"]["content"] == CALL
    assert not choice["message"].get("tool_calls")


async def test_without_a_parser_tools_are_refused_and_the_setting_is_named(engine: Any) -> None:
    handlers = await Handlers.build(engine)
    for api, body in (
        ("chat", asked(tools=[TOOL], tool_choice="auto")),
        ("chat", asked(tools=[TOOL], tool_choice="required")),
        ("respond", RESPONSE | {"tools": [FLAT_TOOL]}),
        ("message", MESSAGE | {"tools": [MESSAGE_TOOL]}),
    ):
        with pytest.raises(Refused, match=r"no tool_parser is set, or none was found \(\[serve\] in the recipe\)"):
            await ask(handlers, body, api)
    assert (await ask(handlers, asked()))["choices"][0]["message"]["content"] == CALL


async def test_the_parser_is_found_in_the_chat_template_and_where_there_is_none_tools_are_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = engine.llm.renderer.get_tokenizer()
    own = tokenizer.chat_template
    shows = own + '{# <tool_call>{"name": ..., "arguments": ...}</tool_call> #}'
    monkeypatch.setattr(tokenizer, "chat_template", shows)
    handlers = await Handlers.build(engine, "auto")
    assert (await ask(handlers, asked(tools=[TOOL])))["choices"][0]["message"]["tool_calls"]
    for template in (own, own + "{# <｜tool▁calls▁begin｜> #}"):  # the second one's tokens are not the tokenizer's
        monkeypatch.setattr(tokenizer, "chat_template", template)
        handlers = await Handlers.build(engine, "auto")
        with pytest.raises(Refused, match="none was found"):
            await ask(handlers, asked(tools=[TOOL]))
    assert "the chat template shows no calls that are known" in caplog.text
    assert "tool_parser deepseek_v31" in caplog.text


async def test_a_response_has_the_targets_calls_as_items_whole_and_streamed(engine: Any) -> None:
    handlers = await Handlers.build(engine, "hermes")
    body = RESPONSE | {"tools": [FLAT_TOOL], "structured_outputs": {"choice": [CALL]}}
    whole = await ask(handlers, body, "respond")
    *_, last = await events(handlers, body, "respond")
    assert (last["type"], last["response"]["id"]) == ("response.completed", f"resp_{'f' * 32}")
    for output in (whole["output"], last["response"]["output"]):
        (call,) = output
        assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})


async def test_a_message_has_the_targets_calls_as_blocks_whole_and_streamed_and_none_that_was_cut(engine: Any) -> None:
    handlers = await Handlers.build(engine, "hermes")
    body = MESSAGE | {"tools": [MESSAGE_TOOL | {"strict": True}], "tool_choice": {"type": "tool", "name": "add"}}
    answer = await ask(handlers, body, "message")
    (block,) = answer["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "add", {"a": 1})
    assert answer["stop_reason"] == "tool_use"
    told = await events(handlers, body, "message")
    parts = [one["delta"]["partial_json"] for one in told if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"a": 1}
    assert [one["delta"]["stop_reason"] for one in told if one["type"] == "message_delta"] == ["tool_use"]
    cut = await ask(handlers, body | {"max_tokens": 3}, "message")
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["text"])


FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("api", "form", "tool"),
    [
        ("respond", {"text": {"format": FORM | {"name": "x"}}}, FLAT_TOOL),
        ("message", {"output_config": {"format": FORM}}, MESSAGE_TOOL),
    ],
)
async def test_what_the_engine_refuses_of_another_api_is_a_refusal_also_where_it_was_to_be_streamed(
    engine: Any, api: str, form: dict[str, Any], tool: dict[str, Any]
) -> None:
    handlers = await Handlers.build(engine, "hermes", Structured(enabled=False))
    try:
        for streams in (False, True):
            with pytest.raises(Refused, match=r"\[serve.structured\]"):
                await ask(handlers, BODIES[api] | form | {"stream": streams}, api)
        # What tools make of the answer is refused once the stream was asked for: nothing may have come before it.
        (only,) = await events(handlers, BODIES[api] | {"tools": [tool | {"strict": True}]}, api)
        assert only["error"]["code"] == 400
    finally:
        engine.llm.grammars = None


async def test_a_chat_carries_no_token_ids_past_what_encodes_its_messages(engine: Any) -> None:
    handlers, body = await Handlers.build(engine), MESSAGE | {"max_tokens": 1}
    with pytest.raises(Refused) as refused:
        await ask(handlers, body | {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}})
    error = refused.value.body["error"]
    assert (error["code"], error["param"]) == (400, "kv_transfer_params.prompt_token_ids")
    assert (await ask(handlers, body))["choices"]


async def ending(answer: asyncio.Task[Any]) -> tuple[str, int]:
    """Return how an answer that broke off is told, and the status: raised, or as an event of its stream."""
    try:
        told = [frame.partition("data: ")[2] for frame in await answer]
    except EngineStopped:
        return "raised", EngineEnded.STATUS
    (error,) = (json.loads(one) for one in told if one.startswith('{"error"'))
    return "event", error["error"]["code"]


async def kill(llm: Any, running: list[str]) -> None:
    llm.output_processor.propagate_error(EngineDeadError())


async def end(llm: Any, running: list[str]) -> None:
    await llm.abort(running, internal=True)  # as the engine's process does when it is told to end


LONG = {"max_tokens": 180, "ignore_eos": True}


@pytest.mark.parametrize(("answer", "how"), [(ask, "raised"), (frames, "event")])
@pytest.mark.parametrize(
    ("api", "more", "break_off"),
    [
        *(("chat", LONG, end), ("chat", LONG, kill), ("chat", LONG | {"n": 2}, end), ("chat", LONG | {"n": 2}, kill)),
        ("respond", {"max_output_tokens": 180, "temperature": 0}, end),
        ("message", {"max_tokens": 180, "temperature": 0}, end),
    ],
)
async def test_an_answer_that_the_engine_broke_off_is_unavailable_and_neither_a_short_answer_nor_a_failure(
    engine: Any, api: str, more: dict[str, int], break_off: Any, answer: Any, how: str
) -> None:
    handlers, requests = await Handlers.build(engine), engine.llm.output_processor.request_states
    broken = asyncio.create_task(answer(handlers, BODIES[api] | more, api))
    while not any(one.detokenizer.output_token_ids for one in requests.values()):
        assert not broken.done(), broken
        await asyncio.sleep(0.001)
    running = list(requests)
    await break_off(engine.llm, running)
    assert await ending(broken) == (how, EngineEnded.STATUS)
    await engine.llm.abort(running, internal=True)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engine_that_ended_before_it_was_asked_is_unavailable(
    engine: Any, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, body = await Handlers.build(engine), MESSAGE | {"max_tokens": 4}
    monkeypatch.setattr(engine.llm.engine_core.resources, "engine_dead", True)
    with pytest.raises(EngineStopped):
        await ask(handlers, body | {"stream": streams})
    monkeypatch.undo()
    assert (await ask(handlers, body))["choices"]


def test_a_parser_that_is_found_in_a_chat_template_is_one_of_the_engines() -> None:
    assert {name for _, name in TOOL_MARKS} <= (tool_parsers() or set())


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (r"""<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>""", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>", "glm45"),
        ("""{{- "<|python_tag|>" + tool_call.name + ".call(" }}""", "llama3_json"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '```json' }}",
            "deepseek_v3",
        ),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] }}", "deepseek_v31"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", ""),
        ("<tool_calls>[", ""),  # jamba's and hunyuan's
    ],
)
def test_the_parser_of_tool_calls_is_found_by_what_the_chat_template_shows(template: str, parser: str) -> None:
    assert tool_parser_of(template) == parser
