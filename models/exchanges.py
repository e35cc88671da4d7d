"""What comes back from OpenAI's API: a whole response, chunks, or the lines of a Batch file."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from models.rowfiles import WRONG, Row, Unusable


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
