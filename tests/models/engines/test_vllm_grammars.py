"""What a client wants an answer's form to be: taken, refused by its size, or refused by what compiling it takes."""

import asyncio
import json
import os
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

Loop = asyncio.AbstractEventLoop
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TAG = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
# Compiles for a fifth of a second, though it is small: each of many keys may be left out.
SLOW = {"type": "object", "properties": {f"k{n}": {"type": "string", "pattern": "(a|b)*c{1,50}"} for n in range(200)}}


@pytest.fixture(scope="module")
def grammars(engine: Any) -> Iterator[Grammars]:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True, timeout_s=60.0))
    yield grammars
    grammars.close()


def refusal(grammars: Grammars, loop: Loop, form: Form) -> str:
    with pytest.raises(VLLMValidationError) as refused:
        loop.run_until_complete(grammars.require(form))
    return str(refused.value)


def test_a_form_that_compiles_is_taken_and_the_second_time_without_compiling_it(grammars: Grammars, loop: Loop) -> None:
    form = {"type": "object", "properties": {"a": {"type": "integer"}}}
    loop.run_until_complete(grammars.require(Form(json=form)))
    for other in (Form(regex="[a-z]+"), Form(choice=["yes", "no"]), Form(grammar='root ::= "a" root | "b"')):
        loop.run_until_complete(grammars.require(other))
    grammars.close()
    loop.run_until_complete(grammars.require(Form(json=form)))
    assert grammars._child is None
    loop.run_until_complete(grammars.require(Form(regex="[a-y]+")))
    assert grammars._child is not None


@pytest.mark.parametrize(
    "form",
    [Form(regex="(FORGED"), Form(grammar="FORGED"), Form(json={"type": "FORGED"}), Form(json={"properties": "FORGED"}),
     Form(json={"$ref": "#/FORGED"}), Form(grammar="root ::= root"),
     Form(structural_tag='{"structures": "FORGED", "triggers": [5]}')],
    ids=["regex", "grammar", "type", "properties", "reference", "itself", "tag"],
)  # fmt: skip
def test_a_form_that_makes_no_sense_is_refused_without_its_text(grammars: Grammars, loop: Loop, form: Form) -> None:
    assert "FORGED" not in refusal(grammars, loop, form)


def test_what_is_too_large_too_deep_or_too_long_a_pattern_is_refused_before_it_is_compiled(
    engine: Any, loop: Loop
) -> None:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True))
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    assert "16384 bytes" in refusal(grammars, loop, Form(choice=["x" * 20_000]))
    for form in (Form(json=deep), Form(json=json.dumps(deep)), Form(json="[" * 5000 + "]" * 5000)):
        assert "deep" in refusal(grammars, loop, form) or "not valid" in refusal(grammars, loop, form)
    for form in (Form(regex="a" * 513), Form(json={"type": "string", "pattern": "a" * 513}),
                 Form(json={"patternProperties": {"a" * 513: {}}})):  # fmt: skip
        assert "512 characters" in refusal(grammars, loop, form)
    assert grammars._child is None


def test_what_takes_too_long_ends_alone_and_the_next_is_taken(engine: Any, loop: Loop) -> None:
    grammars = Grammars(engine.llm.vllm_config, Structured(enabled=True, timeout_s=0.001))
    try:
        assert TOO_LONG in refusal(grammars, loop, Form(json=SLOW))
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


def test_strings_whose_length_a_schema_bounds_are_json_of_that_length(engine: Any, loop: Loop) -> None:
    """The target's weights are random, so that it writes control characters wherever it may."""
    handlers = loop.run_until_complete(Handlers.build(engine, "", Structured()))
    raw = Request({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**LENGTHS, "additionalProperties": False}}}
    body = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    body |= {"skip_special_tokens": False}  # a string may have them
    try:
        for seed in range(20):
            asked = body | {"response_format": form, "temperature": 1, "seed": seed}
            answer = loop.run_until_complete(handlers.chat(asked, raw))
            assert isinstance(answer, dict)
            if answer["choices"][0]["finish_reason"] == "stop":  # white space before the end may be without one
                text = json.loads(answer["choices"][0]["message"]["content"])["a"]
                assert len(text) >= 4
                assert len(text.replace("\ufffd", "")) <= 12  # bytes that are no character are shown as one each
    finally:
        engine.llm.grammars.close()
        engine.llm.grammars = None


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


def test_no_route_to_a_form_is_open_where_the_recipe_closes_it(engine: Any, loop: Loop) -> None:
    handlers = loop.run_until_complete(Handlers.build(engine, "hermes", Structured(enabled=False)))
    raw = Request({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []})
    schema = {"name": "x", "schema": {"type": "object"}}
    try:
        for asked in (
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [TAG]}},
            {"structured_outputs": {"regex": "a+"}},
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
            {"tools": [TOOL], "parallel_tool_calls": False},
        ):
            body = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | asked
            with pytest.raises(Refused, match=r"\[serve.structured\]") as refused:
                loop.run_until_complete(handlers.chat(body, raw))
            assert refused.value.body["error"]["code"] == 400
        for asked in ({"response_format": {"type": "text"}}, {"tools": [TOOL]}):
            body = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | asked
            answer = loop.run_until_complete(handlers.chat(body, raw))
            assert isinstance(answer, dict)
        for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a+"}}):
            body = {"model": "target", "prompt": "hi", "max_tokens": 4} | asked
            with pytest.raises(Refused, match=r"\[serve.structured\]"):
                loop.run_until_complete(handlers.complete(body, raw))
    finally:
        engine.llm.grammars = None
