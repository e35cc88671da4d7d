"""What a row of a log or of a data set says: messages, tools, template arguments and the answer, in one shape.

A row is a chat (`messages`, or ShareGPT's `conversations`), an exchange as OpenAI's API has it (`request` and
`response`, whole or as chunks; a line of a Batch file), or `prompt` and `completion` as texts or messages. A structure
may be JSON text, as in a CSV's cell; an empty cell is not given.

What comes back from OpenAI's API is a whole response, chunks, or the lines of a Batch file.

Nothing that the service would render is left out in silence: what can't be rendered, or whose tokens its text doesn't
tell, is an `Unusable` with a reason to count it under.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

from models.rowfiles import WRONG, Row, Unusable
from models.sources import Document, Message, Prompt, Role

ROLES = {role: role for role in get_args(Role)} | {"human": "user", "gpt": "assistant", "model": "assistant"}
# A part of a message to the key that holds its text.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
EXCHANGES = (("request", "response"), ("request_body", "response_body"), ("input", "output"))
CHATS = ("messages", "conversations", "conversation")
# Settings of a request to the values with which its prompt is rendered, and its answer's text written, as here.
PLAIN: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
# What is read of a row beside its chat, as of a request.
BESIDE = ("tools", "functions", "chat_template_kwargs", "user", "safety_identifier")
NO_ANSWER = "without an answer"  # why a row is left out
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell it, UTF-8 can't


class Answer(NamedTuple):
    """The answer of a conversation: the message as a later request holds it, the rest as OpenAI's API tells it.

    Attributes:
        end: what ends it: the token that the template writes after an answer, the tokenizer's own end, a token, or
            nothing.
        unknown: why its text doesn't tell its tokens, as a reason to count; "" where it does.
    """

    message: Message
    finish_reason: str = "stop"
    end: Literal["template", "eos"] | int | None = "template"
    unknown: str = ""
    token_ids: list[int] | None = None


class Conversation(NamedTuple):
    """What was asked, and what was answered.

    Attributes:
        template_arguments: what else the chat template is given.
        names: of who asked: the row's `subject` and `aliases`, the request's `safety_identifier` and `user`.
        continues: the last message is the assistant's, and the answer goes on with it.
        weightless: an earlier answer is not to be learnt.
        num_tokens: of prompt and answer, as counted by a service of this kind.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    template_arguments: dict[str, Any]
    names: dict[str, Any]
    temperature: object
    answer: Answer | None = None
    continues: bool = False
    weightless: bool = False
    prompt_ids: list[int] | None = None
    num_tokens: tuple[object, object] | None = None


def given(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that say something: neither nothing nor a blank text."""
    return {name: value for name, value in row.items() if value is not None and not _is_blank(value)}


def read_conversation(row: Mapping[str, Any], column: str = CHATS[0]) -> Conversation:
    """Read a row, whose `column` holds a chat, or a text that is one message of the user's.

    Where a row has none named "messages", it may be of another form. ValueError, mostly an `Unusable`, if it can't be
    rendered as the service would.
    """
    fields = given(row)
    if _is_zero(fields.get("weight")):
        raise Unusable("of weight 0", "the row is not to be learnt")
    if column == CHATS[0]:
        for asked, answered in EXCHANGES:
            if isinstance(request := structure(fields.get(asked)), dict):
                return _exchange(body_of(request), fields.get(answered), fields)
        if isinstance(request := structure(fields.get("body")), dict):
            return _exchange(request, None, fields)
        if column in fields and isinstance(response := structure(fields.get("response")), dict | list):
            return _exchange({**fields, column: structure(fields[column])}, response, fields)
        if "custom_id" in fields and "response" in fields:
            raise Unusable("without its request", f"no line asks what custom_id {fields['custom_id']!r} answers")
        if column not in fields and "prompt" in fields:
            said = [*_said(fields["prompt"], "user"), *_said(fields.get("completion"), "assistant")]
            return _chat(said, fields, "prompt and completion")
        column = next((name for name in CHATS if name in fields), column)
    if column not in fields:
        raise Unusable(WRONG, f'no column "{column}"; there are: {", ".join(map(str, row)) or "none"}')
    return _chat(_said(fields[column], "user"), fields, f'column "{column}"')


def prompt_from_row(row: Row, column: str, domain: str, group: str) -> Prompt:
    """Map a row to a prompt, without the assistant's messages at its end: the answer is the target's to give.

    Of `column` see `read_conversation`; domain "" reads the row's column `domain`. ValueError as `read_conversation`,
    or there is no domain, or nothing before the answer.
    """
    said = read_conversation(row, column)
    messages = list(said.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise Unusable(WRONG, f'column "{column}": no message before the assistant\'s')
    shared: dict[str, Any] = {"tools": said.tools, "template_arguments": said.template_arguments}
    return Prompt(messages=tuple(messages), **shared, domain=_domain(row, domain), group=group)


def document_from_row(row: Row, column: str, domain: str, group: str) -> Document:
    """Map a row to a document: a text as it is, or a whole chat; see `prompt_from_row`."""
    if column in row and isinstance(row[column], str) and isinstance(structure(row[column]), str):
        read_conversation(row, column)  # checks the text
        return Document(content=row[column], domain=_domain(row, domain), group=group)
    said = read_conversation(row, column)
    if said.weightless:
        raise Unusable("of weight 0", "one of the answers is not to be learnt")
    content = (*said.messages, *([said.answer.message] if said.answer else []))
    shared: dict[str, Any] = {"tools": said.tools, "template_arguments": said.template_arguments}
    return Document(content=content, **shared, domain=_domain(row, domain), group=group)


def _said(value: object, role: str) -> list[Any]:
    if value is None:
        return []
    parsed = structure(value)
    if isinstance(parsed, list) and (not isinstance(value, str) or all(isinstance(one, dict) for one in parsed)):
        return parsed
    return [{"role": role, "content": value}]


def _chat(said: Sequence[Any], fields: Mapping[str, Any], where: str) -> Conversation:
    raw = [_as_openai(one) for one in said]
    if "system" in fields and not any(_role(one) == "system" for one in raw):
        raw = [{"role": "system", "content": fields["system"]}, *raw]
    first = next((place for place, one in enumerate(raw) if _role(one) not in ("system", "developer")), len(raw))
    while len(raw) > first and _role(raw[first]) == "assistant":
        del raw[first]  # it answers nothing
    if len(raw) == first:
        raise Unusable("without a question", f"{where}: wanted a question, of the user or a tool")
    has_answer = _role(raw[-1]) == "assistant"
    messages = [_message(one, f"{where}, message {place}") for place, one in enumerate(raw)]
    beside = {name: value for name, value in fields.items() if name in BESIDE}
    asked = _conversation(messages[: len(messages) - has_answer], beside, fields)
    return asked._replace(
        answer=_answer(raw[-1], fields, fields, where) if has_answer else None,
        weightless=any(_role(one) == "assistant" and _is_zero(one.get("weight")) for one in raw),
    )


def _exchange(request: Mapping[str, Any], told: object, fields: Mapping[str, Any]) -> Conversation:
    """Read what a client sent and what came back; without a response there is no answer."""
    raw = structure(request.get("messages"))
    if not isinstance(raw, list) or not raw:
        raise Unusable("of another API", f"wanted a request with messages, got {', '.join(map(str, request))}")
    messages = [_message(one, f"message {place}", served=True) for place, one in enumerate(raw)]
    continues = request.get("continue_final_message") is True
    if not continues and request.get("add_generation_prompt") is False:
        raise Unusable("with add_generation_prompt", "add_generation_prompt is false: no answer begins")
    asked = _conversation(messages, request, fields)._replace(continues=continues)
    if fields.get("error") is not None:
        raise Unusable("that failed", f"the request failed: {fields['error']}")
    if told is None:
        return asked
    response = read_response(structure(told))
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise Unusable("with n", "wanted a response with one choice")
    usage: Any = response.get("usage")
    told_of = usage.get("redraft") if isinstance(usage, Mapping) else None
    if isinstance(told_of, Mapping) and told_of.get("lossless") is False:
        raise Unusable("that a small model wrote in part", "the answer is not the target's own")
    return asked._replace(
        answer=_answer(choices[0].get("message"), choices[0], request, "response", served=True),
        prompt_ids=response.get("prompt_token_ids"),
        num_tokens=(usage.get("prompt_tokens"), usage.get("completion_tokens")) if told_of is not None else None,
    )


def _conversation(messages: Sequence[Message], request: Mapping[str, Any], fields: Mapping[str, Any]) -> Conversation:
    """Return what a request, or a row with its fields, says beside the answer."""
    for name, allowed in PLAIN.items():
        if (value := request.get(name)) is not None and value not in allowed:
            raise Unusable(f"with {name}", f"{name} is {str(value)[:80]}, with which nothing is rendered here")
    tools, arguments = structure(request.get("tools")) or [], structure(request.get("chat_template_kwargs")) or {}
    if not isinstance(tools, list) or not isinstance(arguments, dict):
        raise Unusable(WRONG, "wanted tools as a list and chat_template_kwargs as an object")
    if (effort := request.get("reasoning_effort")) is not None:  # as vLLM does
        arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    if request.get("documents") is not None:
        arguments = {**arguments, "documents": request["documents"]}
    names = {name: fields.get(name) for name in ("subject", "aliases")}
    names |= {name: request.get(name) for name in ("safety_identifier", "user")}
    return Conversation(
        tuple(messages),
        tuple(map(_tool, tools)),
        arguments,
        names={name: value for name, value in names.items() if value is not None},
        temperature=fields.get("temperature", request.get("temperature")),
    )


def _answer(
    value: object, choice: Mapping[str, Any], request: Mapping[str, Any], where: str, served: bool = False
) -> Answer:
    if isinstance(value, Mapping) and _is_zero(value.get("weight")):
        raise Unusable("of weight 0", f"{where}: the answer is not to be learnt")
    said = {"role": "assistant", **value} if isinstance(value, Mapping) else value
    message = _message(said, f"{where}, the answer", served)
    finish = choice.get("finish_reason") or "stop"
    if finish not in ("stop", "length", "tool_calls"):
        wanted = "wanted stop, length or tool_calls"
        raise Unusable("that ended otherwise", f"{where}: finish_reason is {finish!r}, {wanted}")
    stopped, token_ids = choice.get("stop_reason"), choice.get("token_ids")
    answer = Answer(message, finish, token_ids=token_ids)
    if message.tool_calls:
        return answer._replace(unknown="with tool calls in the answer")
    if message.reasoning:
        return answer._replace(unknown="with reasoning in the answer")
    if not message.content and not token_ids:
        raise Unusable(NO_ANSWER, f"{where}: the answer is empty")
    if any("\ufffd" in text for text in message.texts):
        return answer._replace(unknown="with bytes that are no text in the answer")
    if isinstance(stopped, str):
        return answer._replace(unknown="ended by a stop string")
    if finish == "length" or ("stop_reason" not in choice and request.get("stop")):
        return answer._replace(end=None)
    if isinstance(stopped, int):
        return answer._replace(end=stopped)
    return answer._replace(end="eos") if "stop_reason" in choice else answer


def _message(value: object, where: str, served: bool = False) -> Message:
    """Read a message; one that was not served, but comes from a file, has to say something."""
    if not isinstance(value, Mapping):
        raise Unusable(WRONG, f"{where}: wanted an object with role and content, got {type(value).__name__}")
    if (role := _role(value)) is None:
        said = f'{where}: "role" is {value.get("role")!r}, wanted one of {", ".join(ROLES)}'
        raise Unusable("with an unknown role", said)
    for name in ("function_call", "refusal", "audio"):
        if value.get(name):
            raise Unusable(f"with {name}", f"{where}: {name} is not rendered")
    calls = structure(value.get("tool_calls")) or ()
    content = _content(value.get("content"), where)
    if any(_LONE_SURROGATE.search(text) for text in ((content,) if isinstance(content, str) else content)) or (
        not served and not calls and role != "tool" and _is_blank(content)
    ):
        said = f'{where}: "content" is {content!r}, wanted a text that is not blank and is valid Unicode'
        raise Unusable(WRONG, said)
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise Unusable(WRONG, f"{where}: wanted tool_calls with a function's name and arguments each")
    reasoning, named, call_id = value.get("reasoning"), value.get("name"), value.get("tool_call_id")
    return Message(
        role=role,
        content=content,
        reasoning=value.get("reasoning_content") if reasoning is None else reasoning,
        name=named if isinstance(named, str) else None,
        tool_calls=tuple(map(dict, calls)) if role == "assistant" else (),
        tool_call_id=call_id if isinstance(call_id, str) else None,
    )


def _content(value: object, where: str) -> str | tuple[str, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise Unusable(WRONG, f'{where}: "content" is {value!r}, wanted a text or a list of parts')
    texts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in TEXTS:
            wanted = f"wanted {', '.join(TEXTS)}"
            raise Unusable("with parts that are no text", f"{where}: a part is of type {kind!r}, {wanted}")
        text = part.get(TEXTS[kind]) if isinstance(part, Mapping) else part
        if text is not None and not isinstance(text, str):
            raise Unusable(WRONG, f"{where}: wanted a text in a part of type {kind!r}, got {type(text).__name__}")
        texts += [] if text is None else [text]
    return texts[0] if len(texts) == 1 else tuple(texts) if texts else ""


def _tool(value: object) -> dict[str, Any]:
    """Return a tool as OpenAI's API takes it; its function alone does, too."""
    function = value.get("function", value if "type" not in value else None) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unusable("with tools that are no functions", f"wanted a function with a name, got {str(value)[:80]}")
    return {"type": "function", "function": dict(function)}


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            json.loads(arguments)
        except ValueError:
            return False
    return isinstance(arguments, str | dict | None)


def _as_openai(value: object) -> Any:
    if not isinstance(value, Mapping) or "from" not in value or "role" in value:
        return value
    return {"role": value["from"], "content": value.get("value"), **value}


def _role(value: object) -> Any:
    role = value.get("role") if isinstance(value, Mapping) else None
    return ROLES.get(role) if isinstance(role, str) else None


def _domain(row: Row, domain: str) -> str:
    domain = domain or row.get("domain") or ""
    if not isinstance(domain, str) or not domain:
        raise Unusable("without a domain", 'set the parameter "domain", or give the row a column "domain" of text')
    return domain


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def _is_zero(value: object) -> bool:
    try:
        return float(str(value)) == 0
    except ValueError:
        return False


def structure(value: object) -> Any:
    """Return what JSON text of an object or list holds, and any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def body_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    body = structure(value.get("body"))
    return body if isinstance(body, dict) else value


def paired(rows: Iterable[tuple[str, Row]], on_fault: Callable[[str, Unusable], None]) -> Iterator[tuple[str, Row]]:
    """Join each line of a Batch API's input with the line of its output, by `custom_id`, in whatever order they come.

    Other rows pass, with their places. `on_fault` is told of lines whose `custom_id` two requests bear.
    """
    waiting: dict[str, dict[str, tuple[str, Row]]] = {}
    ambiguous: set[str] = set()
    for place, row in rows:
        name = row.get("custom_id")
        side = next((side for side in ("body", "response", "error") if row.get(side) is not None), None)
        if not isinstance(name, str) or side is None or "request" in row:
            yield place, row
            continue
        halves = waiting.setdefault(name, {})
        if name in ambiguous or (side := "asked" if side == "body" else "answered") in halves:
            ambiguous.add(name)
            for where, _ in (*halves.values(), (place, row)):
                on_fault(where, Unusable("with a custom_id given twice", f"custom_id {name!r} is not of one request"))
            halves.clear()
            continue
        halves[side] = place, row
        if len(halves) == 2:
            del waiting[name]
            yield place, {**halves["asked"][1], **halves["answered"][1], "request": halves["asked"][1]["body"]}
    for halves in waiting.values():
        yield from halves.values()


def read_response(value: Any) -> Mapping[str, Any]:
    """Return a whole response: of chunks, of the events that they came in, or of the answer's text or message alone."""
    if isinstance(value, str) and value.lstrip().startswith(("data:", "event:", "id:", ":")) and "data:" in value:
        lines = (line.removeprefix("data:").strip() for line in value.split("\n") if line.startswith("data:"))
        value = [json.loads(line) for line in lines if line != "[DONE]"]
    if isinstance(value, list):
        value = _joined(value)
    elif isinstance(value, str):
        value = {"content": value}
    if not isinstance(value, Mapping):
        raise Unusable(WRONG, f"response: wanted an object, chunks or a text, got {type(value).__name__}")
    status = value.get("status_code", 200)
    if status != 200 or value.get("error") is not None:
        raise Unusable("that failed", f"the request failed: {value.get('error') or status}")
    body = body_of(value)
    return {"choices": [{"message": body}]} if "choices" not in body and "content" in body else body


def _joined(chunks: Sequence[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    choice: dict[str, Any] = {"message": message}
    head: dict[str, Any] = {"choices": [choice]}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or chunk.get("error") is not None:
            raise Unusable("that failed", f"the response has the chunk {str(chunk)[:80]}")
        head |= {name: chunk[name] for name in ("usage", "prompt_token_ids") if chunk.get(name) is not None}
        for one in chunk.get("choices") or ():
            if one.get("index", 0) != 0:
                raise Unusable("with n", "wanted a response with one choice")
            delta = one.get("delta") or {}
            for name in ("content", "reasoning", "reasoning_content", "refusal"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                function = calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                for name in function:
                    function[name] += (call.get("function") or {}).get(name) or ""
            if delta.get("function_call"):
                message["function_call"] = delta["function_call"]
            if one.get("token_ids"):
                choice["token_ids"] = [*choice.get("token_ids", ()), *one["token_ids"]]
            if one.get("finish_reason"):
                choice |= {name: one[name] for name in ("finish_reason", "stop_reason") if name in one}
    if "finish_reason" not in choice:
        raise Unusable("broken off", "the response has no finish_reason")
    message["tool_calls"] = [{"type": "function", "function": function} for function in calls.values()]
    return head
