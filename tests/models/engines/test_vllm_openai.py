"""Tool calls through the engine's own handlers, and answers that the engine breaks off."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from models.engines.vllm.installed import tool_parsers
from models.engines.vllm.openai import TOOL_MARKS, EngineStopped, Handlers, Refused, tool_parser_of
from models.engines.vllm.tap import EngineEnded
from models.serving import Structured

pytestmark = pytest.mark.engine

Loop = asyncio.AbstractEventLoop
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def asked(**options: Any) -> dict[str, Any]:
    """A request whose answer is fixed by a grammar, because the target has random weights."""
    return {
        "model": "target",
        "messages": [{"role": "user", "content": "add 1"}],
        "max_tokens": 100,
        "structured_outputs": {"choice": [CALL]},
        **options,
    }


def request() -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", b"f" * 32)]})


def ask(handlers: Handlers, loop: Loop, body: dict[str, Any], api: str = "chat") -> dict[str, Any]:
    answer = loop.run_until_complete(getattr(handlers, api)(body, request()))
    assert isinstance(answer, dict)
    return answer


def stream(handlers: Handlers, loop: Loop, body: dict[str, Any], api: str) -> list[dict[str, Any]]:
    """Return the events of an answer's stream."""
    frames = loop.run_until_complete(collected(handlers, body | {"stream": True}, request(), api))
    return [json.loads(frame.partition("data: ")[2]) for frame in frames]


def test_what_the_target_writes_as_a_call_is_parsed_as_the_recipe_says(engine: Any, loop: Loop) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine, "hermes"))
    (choice,) = ask(handlers, loop, asked(tools=[TOOL]))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = ask(handlers, loop, asked())["choices"]
    assert choice["message"]["content"] == CALL
    assert not choice["message"].get("tool_calls")


def test_without_a_parser_tools_are_refused_and_the_setting_is_named(engine: Any, loop: Loop) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine))
    for choice in ("auto", "required"):
        with pytest.raises(Refused, match=r"no tool_parser is set, or none was found \(\[serve\] in the recipe\)"):
            ask(handlers, loop, asked(tools=[TOOL], tool_choice=choice))
    with pytest.raises(Refused, match="no tool_parser is set"):
        ask(handlers, loop, RESPONSE | {"tools": [FLAT_TOOL]}, "respond")
    with pytest.raises(Refused, match="no tool_parser is set"):
        ask(handlers, loop, MESSAGE | {"tools": [MESSAGE_TOOL]}, "message")
    assert ask(handlers, loop, asked())["choices"][0]["message"]["content"] == CALL


def test_the_parser_is_found_in_the_chat_template_and_where_there_is_none_tools_are_refused(
    engine: Any, loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = engine.llm.renderer.get_tokenizer()
    shows = tokenizer.chat_template + '{# <tool_call>{"name": ..., "arguments": ...}</tool_call> #}'
    unknown = tokenizer.chat_template + "{# <｜tool▁calls▁begin｜> #}"  # its tokens are not the tokenizer's
    for template, parses in ((shows, True), (tokenizer.chat_template, False), (unknown, False)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        handlers = loop.run_until_complete(Handlers.build(engine, "auto"))
        if parses:
            assert ask(handlers, loop, asked(tools=[TOOL]))["choices"][0]["message"]["tool_calls"]
        else:
            with pytest.raises(Refused, match="none was found"):
                ask(handlers, loop, asked(tools=[TOOL]))
        monkeypatch.undo()
    assert "the chat template shows no calls that are known" in caplog.text
    assert "tool_parser deepseek_v31" in caplog.text


FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
MESSAGE_TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
}
RESPONSE = {"model": "target", "input": "add 1", "max_output_tokens": 100}
MESSAGE = {"model": "target", "messages": [{"role": "user", "content": "add 1"}], "max_tokens": 100}


def test_a_response_has_the_targets_calls_as_items_whole_and_streamed(engine: Any, loop: Loop) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine, "hermes"))
    body = RESPONSE | {"tools": [FLAT_TOOL], "structured_outputs": {"choice": [CALL]}}
    (call,) = ask(handlers, loop, body, "respond")["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})
    *_, last = stream(handlers, loop, body, "respond")
    assert (last["type"], last["response"]["id"]) == ("response.completed", f"resp_{'f' * 32}")
    (again,) = last["response"]["output"]
    assert (again["type"], again["name"], json.loads(again["arguments"])) == ("function_call", "add", {"a": 1})


def test_a_message_has_the_targets_calls_as_blocks_whole_and_streamed_and_none_that_was_cut(
    engine: Any, loop: Loop
) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine, "hermes"))
    body = MESSAGE | {"tools": [MESSAGE_TOOL | {"strict": True}], "tool_choice": {"type": "tool", "name": "add"}}
    answer = ask(handlers, loop, body, "message")
    (block,) = answer["content"]
    assert (block["type"], block["name"], block["input"], answer["stop_reason"]) == (
        "tool_use",
        "add",
        {"a": 1},
        "tool_use",
    )
    events = stream(handlers, loop, body, "message")
    parts = [one["delta"]["partial_json"] for one in events if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"a": 1}
    assert [one["delta"]["stop_reason"] for one in events if one["type"] == "message_delta"] == ["tool_use"]
    cut = ask(handlers, loop, body | {"max_tokens": 3}, "message")
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["text"])


@pytest.mark.parametrize("api", ["respond", "message"])
def test_what_the_engine_refuses_of_another_api_is_a_refusal_also_where_it_was_to_be_streamed(
    engine: Any, loop: Loop, api: str
) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine, "hermes", Structured(enabled=False)))
    schema = {"type": "object"}
    form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    if api == "message":
        form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    try:
        for streams in (False, True):
            with pytest.raises(Refused, match=r"\[serve.structured\]"):
                ask(handlers, loop, {"respond": RESPONSE, "message": MESSAGE}[api] | form | {"stream": streams}, api)
        # What tools make of the answer is refused once the stream was asked for: nothing may have come before it.
        tool = (FLAT_TOOL if api == "respond" else MESSAGE_TOOL) | {"strict": True}
        (only,) = stream(handlers, loop, {"respond": RESPONSE, "message": MESSAGE}[api] | {"tools": [tool]}, api)
        assert only["error"]["code"] == 400
    finally:
        engine.llm.grammars = None


def test_a_chat_carries_no_token_ids_past_what_encodes_its_messages(engine: Any, loop: Loop) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine))
    body = {"model": "target", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    with pytest.raises(Refused) as refused:
        ask(handlers, loop, body | {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}})
    error = refused.value.body["error"]
    assert (error["code"], error["param"]) == (400, "kv_transfer_params.prompt_token_ids")
    assert ask(handlers, loop, body)["choices"]


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_an_answer_that_the_engine_broke_off_is_unavailable_and_neither_a_short_answer_nor_a_failure(
    engine: Any, loop: Loop, killed: bool, stream: bool, num_choices: int
) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine))
    body = {"model": "target", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 180, "n": num_choices}
    raw = request()

    async def broken() -> dict[str, Any]:
        running = asyncio.create_task(collected(handlers, body | {"ignore_eos": True, "stream": stream}, raw))
        requests = engine.llm.output_processor.request_states
        while not any(one.detokenizer.output_token_ids for one in requests.values()):
            await asyncio.sleep(0.001)
        running_ids = list(requests)
        if killed:
            engine.llm.output_processor.propagate_error(EngineDeadError())
        else:
            await engine.llm.abort(running_ids, internal=True)  # as the engine's process does when it is told to end
        try:
            frames = await running
        except EngineStopped:
            return {}
        finally:
            await engine.llm.abort(running_ids, internal=True)
        assert frames[-1] == "data: [DONE]\n\n"
        return dict(json.loads(frames[-2].removeprefix("data: ")))

    ended = loop.run_until_complete(broken())
    assert ended == {} if not stream else ended["error"]["code"] == EngineEnded.STATUS


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_ended_before_it_was_asked_is_unavailable(
    engine: Any, loop: Loop, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine))
    body = {"model": "target", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": stream}
    monkeypatch.setattr(engine.llm.engine_core.resources, "engine_dead", True)
    with pytest.raises(EngineStopped):
        ask(handlers, loop, body)
    monkeypatch.undo()
    assert ask(handlers, loop, body | {"stream": False})["choices"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["respond", "message"])
def test_an_answer_of_another_api_that_the_engine_broke_off_is_unavailable(
    engine: Any, loop: Loop, api: str, streams: bool
) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine))
    body = {"respond": RESPONSE, "message": MESSAGE}[api] | {"stream": streams, "temperature": 0}
    body |= {"max_output_tokens": 180} if api == "respond" else {"max_tokens": 180}

    async def broken() -> list[str]:
        running = asyncio.create_task(collected(handlers, body, request(), api))
        requests = engine.llm.output_processor.request_states
        while not any(one.detokenizer.output_token_ids for one in requests.values()):
            await asyncio.sleep(0.001)
        await engine.llm.abort(list(requests), internal=True)
        return await running

    if streams:
        *_, last = loop.run_until_complete(broken())
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == EngineEnded.STATUS
    else:
        with pytest.raises(EngineStopped):
            loop.run_until_complete(broken())


async def collected(handlers: Handlers, body: dict[str, Any], raw: Request, api: str = "chat") -> list[str]:
    answer = await getattr(handlers, api)(body, raw)
    assert not isinstance(answer, dict), answer
    return [frame async for frame in answer]


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
