"""What rows say: every form of a chat, and why a row can't be used."""

import json
import random
from typing import Any

import pytest

from models.conversations import document_from_row, paired, prompt_from_row, read_conversation, read_response
from models.rowfiles import FAULTS, Row, Unusable
from models.sources import Message

USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = [USER, SAID]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESPONSE = {"choices": [{"message": SAID, "finish_reason": "stop"}]}


def roles(row: dict[str, Any]) -> list[tuple[str, object]]:
    """Role and text of all messages, the answer's last."""
    said = read_conversation(row)
    return [(one.role, one.content) for one in (*said.messages, *([said.answer.message] if said.answer else []))]


ASKED = {"messages": [USER]}


def exchange(**fields: Any) -> dict[str, Any]:
    return {"request": ASKED | fields, "response": RESPONSE}


def answered(**choice: Any) -> dict[str, Any]:
    return {"request": ASKED, "response": {"choices": [{"message": SAID, **choice}]}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": CHAT},
        {"conversations": json.dumps([{"from": "human", "value": "a"}, {"from": "model", "value": "b"}])},
        {"messages": [SAID, *CHAT]},
        {"conversations": [{"from": "gpt", "value": "hello"}, {"from": "user", "value": "a"}, SAID]},
        {"prompt": "a", "completion": "b"},
        {"prompt": [USER], "completion": [SAID]},
        {"prompt": json.dumps([USER]), "completion": "b"},
        {"prompt": "a", "completion": json.dumps([SAID]), "messages": "", "tools": " "},
        {"request": ASKED, "response": RESPONSE},
        {"request": json.dumps(ASKED), "response": json.dumps(RESPONSE)},
        {"request_body": ASKED, "response_body": RESPONSE},
        {"input": ASKED, "output": SAID},
        {"request": {"method": "POST", "body": ASKED}, "response": {"status_code": 200, "body": RESPONSE}},
        {"model": "m", "messages": [USER], "response": RESPONSE},
        {"request": ASKED, "response": "b"},
    ],
)
def test_every_form_of_one_chat_says_the_same(row: dict[str, Any]) -> None:
    assert roles(row) == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    "row",
    [
        ASKED,
        {"prompt": "a"},
        {"prompt": [USER], "completion": None},
        {"request": ASKED},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ASKED},
    ],
)
def test_a_prompt_alone_has_no_answer(row: dict[str, Any]) -> None:
    assert read_conversation(row).answer is None
    assert roles(row) == [("user", "a")]


def test_a_system_message_beside_the_chat_comes_first_unless_the_chat_has_one() -> None:
    turns = [{"from": "human", "value": "a"}]
    assert roles({"conversations": turns, "system": "s"}) == [("system", "s"), ("user", "a")]
    own = [{"from": "system", "value": "t"}, {"from": "gpt", "value": "hello"}, *turns]
    assert roles({"conversations": own, "system": "s"}) == [("system", "t"), ("user", "a")]


def test_what_a_request_renders_travels_with_its_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "text", "text": None}, "c"]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    result = {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "1", "name": "f"}
    request = {
        "messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}, called, result],
        "tools": [TOOL],
        "chat_template_kwargs": {"x": 1},
        "reasoning_effort": "low",
        "temperature": 0.5,
        "user": "ann",
    }
    said = read_conversation({"request": request, "response": RESPONSE})
    developer, user, assistant, tool = said.messages
    assert (developer.role, user.content) == ("developer", ("a", "b", "c"))
    assert (assistant.tool_calls, assistant.reasoning, assistant.content) == ((CALL,), "hm", "")
    assert tool == Message(role="tool", content="r", tool_call_id="1", name="f")
    assert said.tools == (TOOL,)
    assert said.template_arguments == {"enable_thinking": True, "x": 1, "reasoning_effort": "low"}
    assert (said.temperature, said.names) == (0.5, {"user": "ann"})
    assert user.as_openai()["content"] == [{"type": "text", "text": text} for text in "abc"]
    assert assistant.as_openai()["tool_calls"] == (CALL,)


def test_an_exchange_keeps_a_leading_answer_and_settings_that_change_nothing_are_taken() -> None:
    messages = [SAID, {"role": "user", "content": " "}]
    said = ("assistant", "b")
    assert roles({"request": {"messages": messages}, "response": RESPONSE}) == [said, ("user", " "), said]
    row = exchange(n=1, echo=False, functions=None, skip_special_tokens=True, add_generation_prompt=True, stop=None)
    assert read_conversation(row).answer is not None


@pytest.mark.parametrize(
    ("choice", "request_", "end", "unknown"),
    [
        ({"finish_reason": "stop"}, {}, "template", ""),
        ({"finish_reason": None}, {}, "template", ""),
        ({"finish_reason": "length"}, {}, None, ""),
        ({"finish_reason": "length", "stop_reason": None}, {}, None, ""),
        ({"finish_reason": "stop", "stop_reason": None}, {"stop": ["x"]}, "eos", ""),
        ({"finish_reason": "stop", "stop_reason": 7}, {}, 7, ""),
        ({"finish_reason": "stop"}, {"stop": "x"}, None, ""),
        ({"finish_reason": "stop", "stop_reason": "x"}, {"stop": "x"}, "template", "ended by a stop string"),
    ],
)
def test_an_answer_ends_as_its_finish_reason_says(
    choice: dict[str, Any], request_: dict[str, Any], end: object, unknown: str
) -> None:
    answer: Any = read_conversation(answered(**choice) | {"request": ASKED | request_}).answer
    assert (answer.end, answer.unknown) == (end, unknown)
    own: Any = read_conversation({"messages": CHAT, "finish_reason": "length"}).answer
    assert (own.end, own.finish_reason) == (None, "length")


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        ({"content": None, "tool_calls": [CALL]}, "with tool calls in the answer"),
        ({"content": "b", "reasoning_content": "hm"}, "with reasoning in the answer"),
        ({"content": "b", "reasoning": "hm"}, "with reasoning in the answer"),
        ({"content": "b", "tool_calls": [], "reasoning": None}, ""),
    ],
)
def test_an_answer_whose_text_does_not_tell_its_tokens_says_why(answer: dict[str, Any], unknown: str) -> None:
    for row in ({"messages": [USER, {"role": "assistant", **answer}]}, answered(message=answer)):
        read: Any = read_conversation(row).answer
        assert read.unknown == unknown


BROKEN = {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
CALLED = {**SAID, "function_call": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"text": "a"}, "with wrong fields"),
    ({"messages": 3}, "with wrong fields"),
    ({"messages": ["a"]}, "with wrong fields"),
    ({"messages": [{"role": "user", "content": 3}]}, "with wrong fields"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "with wrong fields"),
    ({"messages": [{"role": "user", "content": None}]}, "with wrong fields"),
    ({"messages": [{"role": "user", "content": [" "]}]}, "with wrong fields"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "with an unknown role"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "with an unknown role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}, SAID]}, "with parts that are no text"),
    ({"messages": [USER, CALLED]}, "with function_call"),
    ({"messages": [USER, CALLED, USER, SAID]}, "with function_call"),
    ({"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]}, "with refusal"),
    ({"messages": [USER, {**SAID, "audio": {"id": "x"}}]}, "with audio"),
    ({"messages": [USER, {**SAID, "weight": 0}]}, "of weight 0"),
    ({"messages": CHAT, "weight": "0.0"}, "of weight 0"),
    ({"messages": CHAT, "weight": 0}, "of weight 0"),
    ({"messages": [{"role": "system", "content": "s"}, SAID]}, "without a question"),
    ({"messages": CHAT, "tools": [{"type": "web_search"}]}, "with tools that are no functions"),
    ({"messages": CHAT, "tools": "[{"}, "with wrong fields"),
    ({"messages": CHAT, "functions": [{"name": "f"}]}, "with functions"),
    ({"messages": [USER, BROKEN]}, "with wrong fields"),
    ({"messages": CHAT, "finish_reason": "content_filter"}, "that ended otherwise"),
    (exchange(n=2), "with n"),
    (exchange(functions=[{"name": "f"}]), "with functions"),
    (exchange(echo=True), "with echo"),
    (exchange(chat_template="{{ messages }}"), "with chat_template"),
    (exchange(add_generation_prompt=False), "with add_generation_prompt"),
    (exchange(skip_special_tokens=False), "with skip_special_tokens"),
    ({"request": {"prompt": "a"}, "response": {"choices": [{"text": "b"}]}}, "of another API"),
    ({"request": {"input": "a"}, "response": {"output": []}}, "of another API"),
    ({"request": ASKED, "response": {"error": {"message": "no"}}}, "that failed"),
    ({"request": ASKED, "response": {"status_code": 500, "body": {}}}, "that failed"),
    ({"request": ASKED, "response": None, "error": {"code": "x"}}, "that failed"),
    ({"request": ASKED, "response": {"choices": []}}, "with n"),
    (answered(message={"content": ""}), "without an answer"),
    ({"custom_id": "1", "response": {"status_code": 200, "body": RESPONSE}}, "without its request"),
    (answered(finish_reason="abort"), "that ended otherwise"),
]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_what_cannot_be_rendered_or_learnt_has_a_reason_of_its_own(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as fault:
        read_conversation(row)
    assert fault.value.reason == reason


def test_columns_that_are_no_settings_are_not_read_as_such() -> None:
    row = {"messages": CHAT, "n": 5, "echo": "x", "documents": ["d"], "q": "a", "request": {"messages": [SAID]}}
    assert prompt_from_row(row, "q", "d", "g").messages[0].content == "a"
    del row["request"]
    assert read_conversation(row).template_arguments == {}


SHAPES = [{"choices": [3]}, {"choices": [{"message": 3}]}, {"choices": [{}]}, [{"choices": [{"delta": 3}]}], "data: {"]


@pytest.mark.parametrize("told", SHAPES)
def test_a_response_of_any_other_shape_fails_with_what_a_row_may_fail_with(told: Any) -> None:
    with pytest.raises(FAULTS):
        read_conversation({"request": ASKED, "response": told})


def test_a_row_becomes_a_text_or_a_whole_chat() -> None:
    messages = [USER, {**SAID, "tool_calls": [CALL]}]
    row = {"messages": messages, "text": "def f(): ...", "tools": [TOOL], "domain": "code"}
    text, whole = (document_from_row(row, column, "", "g") for column in ("text", "messages"))
    assert (text.content, text.tools) == ("def f(): ...", ())
    assert [message.content for message in whole.content] == ["a", "b"]
    assert whole.content[1].tool_calls == (CALL,)
    assert whole.tools == (TOOL,)
    with pytest.raises(ValueError, match='column "messages": wanted a question'):
        document_from_row({"messages": [], "domain": "d"}, "messages", "", "g")
    with pytest.raises(ValueError, match=r'no column "txt"; there are: messages, text, tools, domain'):
        document_from_row(row, "txt", "", "g")


def test_a_chat_loses_the_answer_at_its_end_only_and_one_of_weight_0_is_no_document() -> None:
    row = {"messages": [USER, {**SAID, "weight": 0}, USER, SAID], "domain": "d"}
    assert len(prompt_from_row(row, "messages", "", "g").messages) == 3
    with pytest.raises(Unusable, match="not to be learnt"):
        document_from_row(row, "messages", "", "g")
    chat = [*CHAT, {"role": "user", "content": "c"}]
    row = {"messages": [*chat, {"role": "assistant", "content": "d"}], "domain": "chat"}
    prompt = prompt_from_row(row, "messages", "", "g")
    assert [message.content for message in prompt.messages] == ["a", "b", "c"]
    assert prompt.domain == "chat"


def test_a_text_that_looks_like_json_is_a_text() -> None:
    for text in ('{"a": 1}', "[1, 2]", "[INST] hi", '["a"]'):
        assert roles({"prompt": text}) == [("user", text)]
        assert prompt_from_row({"q": text}, "q", "d", "g").messages[0].content == text


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "a"}, r'no column "messages"; there are: text'),
        ({"messages": "a"}, r'set the parameter "domain"'),
        ({"messages": "a", "domain": 3}, r'set the parameter "domain"'),
        ({"messages": 3, "domain": "d"}, r'message 0: "content" is 3'),
        ({"messages": [], "domain": "d"}, r'column "messages": wanted a question'),
        ({"request": {"messages": [SAID]}, "domain": "d"}, r"no message before the assistant's"),
        ({"messages": ["a"], "domain": "d"}, r"message 0: .* got str"),
        ({"messages": [{"role": "bot", "content": "a"}], "domain": "d"}, "message 0: \"role\" is 'bot', wanted one of"),
    ],
)
def test_a_wrong_row_is_refused_with_its_field(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        prompt_from_row(row, "messages", "", "g")


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    end = {"finish_reason": finish, "stop_reason": None} if finish else {}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **end}]}


PART = {"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"x"'}}
CHUNKS = [
    {**chunk(role="assistant", content=""), "prompt_token_ids": [1, 2]},
    chunk(content="he"),
    chunk(content="llo\u2028", reasoning="h"),
    chunk(tool_calls=[PART]),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    chunk("stop"),
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
]
EVENTS = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in CHUNKS) + "data: [DONE]\n\n"


@pytest.mark.parametrize("told", [CHUNKS, EVENTS, ": ping\n\n" + EVENTS.replace("\n", "\r\n"), {"body": EVENTS}])
def test_a_stream_is_read_as_the_whole_response(told: Any) -> None:
    response = read_response(told if not isinstance(told, dict) else told["body"])
    (choice,) = response["choices"]
    assert choice["message"]["content"] == "hello\u2028"
    assert choice["message"]["reasoning"] == "h"
    assert [one["function"] for one in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert response["prompt_token_ids"] == [1, 2]
    assert response["usage"]["completion_tokens"] == 3


def test_token_ids_of_a_stream_are_joined() -> None:
    first, second = chunk(content="a"), chunk("length", content="b")
    first["choices"][0]["token_ids"], second["choices"][0]["token_ids"] = [1, 2], [3]
    assert read_response([first, second])["choices"][0]["token_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (CHUNKS[:5], "broken off"),
        ([*CHUNKS[:2], {"error": {"message": "x"}}], "that failed"),
        ([{"choices": [{"index": 1, "delta": {}}]}], "with n"),
        (3, "with wrong fields"),
        ({"error": "x"}, "that failed"),
    ],
)
def test_a_response_that_did_not_come_whole_is_not_used(told: Any, reason: str) -> None:
    with pytest.raises(Unusable) as fault:
        read_response(told)
    assert fault.value.reason == reason


def batch(count: int) -> list[Row]:
    asked: list[Row] = [{"custom_id": str(i), "url": "/v1", "body": {"messages": i}} for i in range(count)]
    return asked + [{"custom_id": str(i), "response": {"body": i}, "error": None} for i in range(count)]


def pair(rows: list[Row]) -> tuple[list[Row], list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    placed = [(f"line {number}", row) for number, row in enumerate(rows, start=1)]
    return [row for _, row in paired(placed, lambda where, fault: told.append((where, fault.reason)))], told


def test_the_halves_of_a_batch_find_each_other_in_any_order() -> None:
    rows = [*batch(9), {"messages": []}]
    random.Random(0).shuffle(rows)
    found, told = pair(rows)
    assert not told
    assert sorted(one["request"]["messages"] for one in found if "request" in one) == list(range(9))
    assert all(one["request"]["messages"] == one["response"]["body"] for one in found if "request" in one)
    assert {"messages": []} in found
    assert len(found) == 10


def test_a_half_passes_as_it_is_and_a_failed_request_is_paired_with_its_error() -> None:
    asked, answered = batch(1)
    assert pair([asked]) == ([asked], [])
    assert pair([answered]) == ([answered], [])
    asked = batch(1)[0]
    (row,), _ = pair([asked, {"custom_id": "0", "response": None, "error": {"code": "x"}}])
    assert row["error"] == {"code": "x"}


def test_a_name_of_two_requests_pairs_nothing_but_may_be_used_again_after_its_pair() -> None:
    (asked, answered), other = batch(1), {"custom_id": "0", "body": {"messages": "other"}}
    again = {"custom_id": "0", "response": {"body": "again"}}
    twice = [(f"line {number}", "with a custom_id given twice") for number in (1, 2, 3)]
    assert pair([asked, other, answered]) == ([], twice)
    assert pair([answered, again, asked]) == ([], twice)
    found, told = pair([asked, answered, other, again])
    assert not told
    assert [(one["request"]["messages"], one["response"]["body"]) for one in found] == [(0, 0), ("other", "again")]
