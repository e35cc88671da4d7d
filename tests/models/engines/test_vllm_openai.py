"""Tool calls through the engine's own handlers, and answers that the engine breaks off."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from models.engines.vllm.openai import EngineStopped, Handlers, Refused
from models.engines.vllm.tap import EngineEnded

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


def ask(handlers: Handlers, loop: Loop, body: dict[str, Any]) -> dict[str, Any]:
    raw = Request({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []})
    answer = loop.run_until_complete(handlers.chat(body, raw))
    assert isinstance(answer, dict)
    return answer


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
    with pytest.raises(Refused, match=r"without a tool_parser \(\[serve\] in its recipe\)"):
        ask(handlers, loop, asked(tools=[TOOL]))
    assert ask(handlers, loop, asked())["choices"][0]["message"]["content"] == CALL


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
    raw = Request({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []})

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


async def collected(handlers: Handlers, body: dict[str, Any], raw: Request) -> list[str]:
    answer = await handlers.chat(body, raw)
    assert not isinstance(answer, dict), answer["choices"]
    return [frame async for frame in answer]
