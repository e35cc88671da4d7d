"""What a client wants an answer's form to be: taken, refused by its size, or refused by what compiling it takes."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import xgrammar
from starlette.requests import Request
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams as Form
from xgrammar.testing import _is_grammar_accept_string

from models.engines.vllm.grammars import TOO_LONG, TOO_MUCH_MEMORY, Grammars, as_json, in_fork
from models.engines.vllm.openai import Handlers, Refused
from models.serving import Structured

pytestmark = pytest.mark.engine

RAW = Request({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []})
CHAT = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TAG = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
# Compiles for a fifth of a second, though it is small: each of many keys may be left out.
SLOW = {"type": "object", "properties": {f"k{n}": {"type": "string", "pattern": "(a|b)*c{1,50}"} for n in range(200)}}


@pytest.fixture(scope="module")
def grammars(engine: Any) -> Iterator[Grammars]:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True, timeout_s=60.0))
    yield grammars
    grammars.close()


async def refusal(grammars: Grammars, form: Form) -> str:
    with pytest.raises(VLLMValidationError) as refused:
        await grammars.require(form)
    return str(refused.value)


async def test_a_form_that_compiles_is_taken_and_the_second_time_without_compiling_it(grammars: Grammars) -> None:
    form = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await grammars.require(Form(json=form))
    for other in (Form(regex="[a-z]+"), Form(choice=["yes", "no"]), Form(grammar='root ::= "a" root | "b"')):
        await grammars.require(other)
    grammars.close()
    await grammars.require(Form(json=form))
    assert grammars._child is None
    await grammars.require(Form(regex="[a-y]+"))
    assert grammars._child is not None


@pytest.mark.parametrize(
    "form",
    [
        Form(regex="(FORGED"),
        Form(grammar="FORGED"),
        Form(json={"type": "FORGED"}),
        Form(json={"properties": "FORGED"}),
        Form(json={"$ref": "#/FORGED"}),
        Form(grammar="root ::= root"),
        Form(structural_tag='{"structures": "FORGED", "triggers": [5]}'),
    ],
)
async def test_a_form_that_makes_no_sense_is_refused_without_its_text(grammars: Grammars, form: Form) -> None:
    assert "FORGED" not in await refusal(grammars, form)


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(20):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (Form(choice=["x" * 20_000]), "16384 bytes"),
        (Form(json=DEEP), "deep"),
        (Form(json=json.dumps(DEEP)), "deep"),
        (Form(json="[" * 5000 + "]" * 5000), "deep|not valid"),
        (Form(regex="a" * 513), "512 characters"),
        (Form(json={"type": "string", "pattern": "a" * 513}), "512 characters"),
        (Form(json={"patternProperties": {"a" * 513: {}}}), "512 characters"),
    ],
    ids=["size", "depth", "depth of a text", "brackets", "regex", "pattern", "key"],
)
async def test_what_is_too_large_too_deep_or_too_long_a_pattern_is_refused_before_it_is_compiled(
    engine: Any, form: Form, told: str
) -> None:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True))
    assert re.search(told, await refusal(grammars, form))
    assert grammars._child is None


async def test_what_takes_too_long_ends_alone_and_the_next_is_taken(engine: Any) -> None:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True, timeout_s=0.001))
    try:
        assert TOO_LONG in await refusal(grammars, Form(json=SLOW))
        process = psutil.Process(grammars._child.pid)
        assert process.is_running()
        assert process.children() == []
    finally:
        grammars.close()


@pytest.mark.parametrize("raises", [True, False])
def test_what_takes_more_memory_than_it_may_ends_alone_however_it_ends(raises: bool) -> None:
    def compile_form(form: Form) -> str:
        try:
            return "ok" if bytearray(len(form.choice or ()) << 20) else ""
        except MemoryError:
            if raises:
                raise
            os._exit(1)  # as after an abort in a library

    bounds = Structured(enabled=True, max_memory_mib=16, timeout_s=60.0)
    assert in_fork(compile_form, Form(choice=["a"]), bounds) == "ok"
    assert in_fork(compile_form, Form(choice=["a"] * 256), bounds) == TOO_MUCH_MEMORY


LENGTHS = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 4, "maxLength": 12}},
    "required": ["a"],
}


async def test_strings_whose_length_a_schema_bounds_are_json_of_that_length(engine: Any) -> None:
    """The target's weights are random, so that it writes control characters wherever it may."""
    handlers = await Handlers.build(engine, "", Structured())
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**LENGTHS, "additionalProperties": False}}}
    # A string may have special tokens.
    asked = CHAT | {"max_tokens": 100, "skip_special_tokens": False, "response_format": form, "temperature": 1}
    try:
        answers = await asyncio.gather(*(handlers.chat(asked | {"seed": seed}, RAW) for seed in range(20)))
    finally:
        engine.llm.grammars.close()
        engine.llm.grammars = None
    choices = [answer["choices"][0] for answer in answers]
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]  # white space may go on without end
    assert ended
    for choice in ended:
        text = json.loads(choice["message"]["content"])["a"]
        assert len(text) >= 4
        assert len(text.replace("\ufffd", "")) <= 12  # bytes that are no character are shown as one each


def test_so_are_those_of_a_tools_arguments_and_other_forms_stay_as_they_are() -> None:
    tag = {"begin": "<a>", "content": {"type": "json_schema", "json_schema": LENGTHS}, "end": "</a>"}
    tags = Form(structural_tag=json.dumps({"type": "structural_tag", "format": {"type": "tag", **tag}}))
    for form in (Form(json=LENGTHS), Form(json=json.dumps(LENGTHS)), tags):
        found = as_json(form)
        grammar = xgrammar.Grammar.from_ebnf(found.grammar)
        start, end = ("<a>", "</a>") if form is tags else ("", "")
        for text, is_taken in (('{"a": "abcd"}', True), ('{"a": "abc\td"}', False), ('{"a": "abc"}', False)):
            assert _is_grammar_accept_string(grammar, start + text + end) == is_taken, text
    old = Form(structural_tag=json.dumps({"structures": [{**TAG, "schema": LENGTHS}], "triggers": ["<a>"]}))
    for form in (Form(json={"type": "string"}), Form(regex="minLength"), Form(json_object=True), old):
        assert as_json(form) is form


async def test_no_route_to_a_form_is_open_where_the_recipe_closes_it(engine: Any) -> None:
    handlers = await Handlers.build(engine, "hermes", Structured(enabled=False))
    schema, text = {"name": "x", "schema": {"type": "object"}}, {"model": "target", "prompt": "hi", "max_tokens": 4}
    closed = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [TAG]}},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
        {"tools": [TOOL], "parallel_tool_calls": False},
    ]
    try:
        for asked in closed:
            with pytest.raises(Refused, match=r"\[serve.structured\]") as refused:
                await handlers.chat(CHAT | asked, RAW)
            assert refused.value.body["error"]["code"] == 400
        for asked in ({"response_format": {"type": "text"}}, {"tools": [TOOL]}):
            assert isinstance(await handlers.chat(CHAT | asked, RAW), dict)
        for asked in (closed[0], closed[3]):
            with pytest.raises(Refused, match=r"\[serve.structured\]"):
                await handlers.complete(text | asked, RAW)
    finally:
        engine.llm.grammars = None
