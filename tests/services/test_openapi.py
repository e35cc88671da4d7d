"""What a generator makes of the service's OpenAPI document: nothing that it sends gets a 500 or a shapeless error."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest

from infra.processes import answers, wait_until
from services.access import REQUEST_HEADERS
from services.app import routes
from services.questions import SPECULATION
from tests.world import MODEL, World

pytestmark = pytest.mark.engine

NUM_EXAMPLES = 25
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BODIES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/tokenize": TokenizeChatRequest,
    "/detokenize": DetokenizeRequest,
}
SWITCH = "/redraft/speculation"
PATHS = (
    *BODIES, SWITCH, "/v1/models", "/v1/models/{name}", "/redraft/status", "/redraft/dashboard", "/metrics", "/health",
    "/readyz", "/version",
)  # fmt: skip
# Of a request that names any of them hardly anything else is looked at.
REFUSED = (
    "min_p", "logit_bias", "use_beam_search", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority",
    "background", "previous_response_id", "previous_input_messages",
)  # fmt: skip
REFUSED_HEADERS = ("X-Redraft-Reasoning", "X-Api-Key")  # the second is read where no other key is sent
TEXT = {"type": "string"}
# What is wrong in a header follows from what is right: where any text is right, nothing could be sent that is not.
HEADERS = {
    "X-Redraft-Detail": {"enum": ["steps"]},
    "X-Redraft-Domain": {"type": "string", "pattern": "^[a-z0-9_-]{1,32}$"},
    "X-Redraft-Group": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "X-Redraft-Log": {"enum": ["none", "metadata", "full"]},
    "X-Redraft-Speculation": {"enum": [*SPECULATION]},
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "name": TEXT,
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}


def of(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object of these properties, all of them and no other."""
    rest = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


NULLABLE, SOME_TEXT = {"type": ["string", "null"]}, {"type": "string", "minLength": 1}
ERROR = of(error=of(message=SOME_TEXT, type=TEXT, param=NULLABLE, code=NULLABLE))

PART = {"type": "object", "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": TEXT}}
CALL = {"type": "object", "properties": {"type": {"const": "function_call"}, "arguments": TEXT, "name": TEXT}}
ITEM = {
    "anyOf": [MESSAGE, CALL, {**MESSAGE, "properties": {"role": TEXT, "content": {"type": "array", "items": PART}}}]
}
TOOLS = {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"type": TEXT, "name": TEXT}}}
OTHER_ERROR = of(type={"const": "error"}, error=of(type=TEXT, message=SOME_TEXT))  # Anthropic's


def document() -> dict[str, Any]:
    """Return the document of the service's own routes, with the headers and the bodies that it reads by hand."""
    told = routes(None).openapi()  # type: ignore[arg-type] # of a service that nobody asks yet
    ours = [name for name in REQUEST_HEADERS if name.startswith("X-")]
    assert {*HEADERS, *REFUSED_HEADERS} == {*ours}
    sent = [{"name": name, "in": "header", "schema": schema} for name, schema in HEADERS.items()]
    for path, operations in told["paths"].items():
        error = OTHER_ERROR if path.startswith("/v1/messages") else ERROR
        refused = {"description": "a refusal", "content": {"application/json": {"schema": error}}}
        for operation in operations.values():
            kinds: dict[str, Any] = {kind: {} for kind in ("text/event-stream", "text/plain", "text/html")}
            kinds["application/json"] = {"schema": {"type": "object"}}
            operation["responses"] = {"200": {"description": "an answer", "content": kinds}, "4XX": refused}
            operation["parameters"] = [*operation.get("parameters", ()), *sent]
        if path in BODIES:
            body = BODIES[path].model_json_schema(ref_template="#/components/schemas/{model}")
            told.setdefault("components", {}).setdefault("schemas", {}).update(body.pop("$defs", {}))
            shorter = {"type": "integer", "minimum": -1, "maximum": 8}
            most = "max_output_tokens" if "input" in body["properties"] else "max_tokens"
            body["properties"] |= {"model": {"const": MODEL}, most: shorter, "n": shorter}
            if "messages" in body["properties"]:
                messages = {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3}
                body["properties"] |= {"messages": messages, "max_completion_tokens": shorter}
            if "input" in body["properties"]:
                items = {"type": "array", "items": ITEM, "maxItems": 3}
                body["properties"] |= {"input": {"anyOf": [TEXT, items]}, "tools": TOOLS, "tool_choice": TEXT}
            for name in REFUSED:
                body["properties"].pop(name, None)
            body["required"] = sorted({*body.get("required", []), most})
            _take(operations["post"], body)
        elif path == SWITCH:
            _take(operations["post"], of(on={"type": "boolean"}))
    return told


def _take(operation: dict[str, Any], body: dict[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}


def test_no_route_is_left_out() -> None:
    assert {*PATHS} == document()["paths"].keys()


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", PATHS)
def test_whatever_is_sent_is_answered_or_refused_in_its_apis_shape(
    world: World, path: str, mode: GenerationMode
) -> None:
    if path == "/readyz":
        wait_until(lambda: answers(f"{world.url}{path}"), 60, None, path)
    takes_body = path in (*BODIES, SWITCH)
    operation = schemathesis.openapi.from_dict(document())[path]["POST" if takes_body else "GET"]

    @settings(
        max_examples=NUM_EXAMPLES if takes_body else 4, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        case.call_and_validate(base_url=world.url, headers=world.operator, checks=CHECKS, timeout=60)

    ask()
    if path == SWITCH:
        switched = httpx.post(world.url + SWITCH, json={"on": True}, headers=world.operator, trust_env=False)
        assert switched.json() == {"speculating": True}
    assert httpx.get(f"{world.url}/health", timeout=60, trust_env=False).status_code == httpx.codes.OK
