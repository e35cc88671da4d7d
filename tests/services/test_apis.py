"""The other APIs of the service, asked by their own stock clients: what holds for chats holds there."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from infra.consent import subject_of
from infra.keys import sha256_of
from tests.world import KEY, MAX_MODEL_LEN, MODEL, PROMPTS, TLS, World, ask

pytestmark = pytest.mark.engine

FULL = {"X-Redraft-Log": "full"}
RESPONSE = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "temperature": 0}
MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def post(world: World, path: str, body: Any, **headers: str) -> httpx.Response:
    told = world.headers | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(world.url + path, json=body, headers=told, timeout=60, verify=TLS, trust_env=False)


@pytest.fixture
def claude(world: World) -> Iterator[anthropic.Anthropic]:
    """Anthropic's stock client, which sends its key in a header of its own."""
    with anthropic.Anthropic(base_url=world.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_one_model_is_told_by_its_name_and_another_is_not_there(world: World, client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == client.models.list().data[0].id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is: target") as refused:
        client.models.retrieve("gpt/4")
    assert refused.value.code == "model_not_found"


def test_the_version_is_vllms_and_needs_a_key(world: World) -> None:
    import vllm

    asked = [httpx.get(f"{world.url}/version", headers=told, trust_env=False) for told in (world.headers, {})]
    assert (asked[0].json(), asked[1].status_code) == ({"version": vllm.__version__}, 401)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses/resp_1/cancel"])
def test_what_is_not_served_is_refused_and_the_paths_that_are_served_are_named(world: World, path: str) -> None:
    told = post(world, path, {}).json()["error"]
    assert told["type"] == "not_found_error"
    assert "/v1/chat/completions, /v1/completions, /v1/messages," in told["message"]
    assert "/redraft" not in told["message"]


def test_a_text_and_a_chat_are_tokenized_as_they_are_answered(world: World, client: openai.OpenAI) -> None:
    turns, asked = [{"role": "user", "content": "what is <|im_end|>?"}], {"return_token_ids": True}
    chat = post(world, "/tokenize", {"model": MODEL, "messages": turns, "return_token_strs": True}).json()
    answer = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=1, extra_body=asked)
    assert chat["tokens"] == answer.prompt_token_ids
    assert (chat["count"], chat["max_model_len"]) == (len(chat["tokens"]), MAX_MODEL_LEN)
    assert chat["token_strs"].count("<|im_end|>") == 1  # the template's own
    text = post(world, "/tokenize", {"prompt": "one two"}).json()
    completion = client.completions.create(model=MODEL, prompt="one two", max_tokens=1, extra_body=asked)
    assert text["tokens"] == completion.choices[0].prompt_token_ids
    for wrong, code in (
        ({"add_special_tokens": True, "messages": turns}, "unsupported"),
        ({"prompt": "x" * 5000}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context_length_exceeded"),
    ):
        refused = post(world, "/tokenize", wrong).json()["error"]
        assert (refused["param"], refused["code"]) == (next(iter(wrong)), code)


def test_tokens_are_a_text_again_and_those_that_are_none_are_refused(world: World) -> None:
    text = "one <|im_end|> zwölf"
    tokens = post(world, "/tokenize", {"prompt": text}).json()["tokens"]
    assert post(world, "/detokenize", {"model": MODEL, "tokens": tokens}).json() == {"prompt": text}
    assert httpx.post(f"{world.url}/detokenize", json={"tokens": tokens}, trust_env=False).status_code == 401
    too_long = ([1] * (MAX_MODEL_LEN + 1), "context_length_exceeded")
    for wrong, code in (([-1], None), ([2**40], None), ("x", None), too_long):
        refused = post(world, "/detokenize", {"tokens": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
        assert refused.json()["error"]["param"].startswith("tokens")


def test_a_response_is_a_chats_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    chat = ask(client, PROMPTS[0], max_tokens=16)
    said = {"model": MODEL, "input": PROMPTS[0], "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**said)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.redraft["steps"] > 0
    with client.responses.stream(**said) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert (final.output_text, final.usage.redraft["steps"] > 0) == (whole.output_text, True)
    assert final.id != whole.id


def test_a_response_reads_items_instructions_and_calls_as_a_chat_reads_its_messages(client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": "add"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "two <|im_end|>"},
        {"role": "user", "content": [{"type": "input_text", "text": "so?"}]},
    ]
    said = {"instructions": "be brief", "input": items, "max_output_tokens": 4}
    made = client.responses.create(model=MODEL, temperature=0, **said)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "two <|im_end|>"},
        {"role": "user", "content": "so?"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=4, temperature=0)
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.output_text == chat.choices[0].message.content


def test_a_message_is_a_chats_answer_whole_and_streamed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = ask(client, PROMPTS[1], max_tokens=16)
    said: Any = {**MESSAGE, "messages": [{"role": "user", "content": PROMPTS[1]}], "max_tokens": 16}
    sampling = {"temperature": said.pop("temperature")}
    whole = claude.messages.create(**said, extra_body=sampling)
    assert whole.content[0].text == chat.choices[0].message.content
    assert whole.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    assert whole.usage.redraft["steps"] > 0
    with claude.messages.stream(**said, extra_body=sampling) as stream:
        kinds = [one.type for one in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.content[0].text == whole.content[0].text
    raw = "".join(claude.messages.create(**said, extra_body=sampling, stream=True).response.iter_text())
    [usage] = [json.loads(line[6:])["usage"] for line in raw.splitlines() if '"type":"message_delta"' in line]
    assert usage["redraft"]["steps"] > 0
    counted = claude.messages.count_tokens(model=MODEL, messages=said["messages"])
    assert counted.input_tokens == chat.usage.prompt_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_only_what_was_consented_to_is_logged_of_every_api(world: World, path: str, body: dict[str, Any]) -> None:
    domain = path.removeprefix("/v1/")
    for consent, sent in [("metadata", {}), ("metadata", {"store": True}), ("none", {"store": True})]:
        assert post(world, path, body | sent | {"user": "secret-of-none"}, X_Redraft_Log=consent).status_code == 200
    assert post(world, path, body, X_Redraft_Domain=domain).status_code == 200  # says nothing
    named = {"user": "ada"} if path == "/v1/responses" else {"metadata": {"user_id": "ada"}}
    for store, stream in ((True, False), (None, True)):
        said = body | named | ({} if store is None else {"store": store}) | {"stream": stream}
        headers = {"X_Redraft_Domain": domain} | ({"X_Redraft_Log": "full"} if store is None else {})
        assert post(world, path, said, **headers).status_code == 200
    first, second = world.wait_for_rows(domain, 2)  # of full consent
    assert first.subject == second.subject == subject_of(sha256_of(KEY), "ada")
    assert first.key == second.key == subject_of(sha256_of(KEY), None)
    assert first.completion_ids == second.completion_ids
    assert first.prompt_ids == second.prompt_ids
    assert "hello" in first.prompt


ODD_RESULT = {"type": "tool_result", "content": [{"type": "image", "source": "no object"}]}
REFUSED = {
    "/v1/responses": [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported"),
        ({"background": True}, "background", "unsupported"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input", None),
        ({"input": [{"type": "message", "role": "assistant", "content": []}]}, "input", "invalid_schema"),
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"input": 5}, "input.str", None),
    ],
    "/v1/messages": [
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "unsupported"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, None, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [ODD_RESULT]}]}, None, None),
        ({"model": "other"}, "model", "model_not_found"),
        ({"max_tokens": 0}, "max_tokens", None),
    ],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_served_is_refused_in_its_apis_shape_before_a_stream(world: World, path: str, stream: bool) -> None:
    valid = {"/v1/responses": RESPONSE, "/v1/messages": MESSAGE}[path] | {"stream": stream}
    for wrong, param, code in REFUSED[path]:
        answer = post(world, path, valid | wrong)
        told = answer.json()
        assert answer.status_code == (404 if code == "model_not_found" else 400), (wrong, told)
        if path == "/v1/messages":
            kind = "not_found_error" if code == "model_not_found" else "invalid_request_error"
            assert told == {"type": "error", "error": {"type": kind, "message": told["error"]["message"]}}
        else:
            assert (told["error"]["param"], told["error"]["code"]) == (param, code), wrong
    assert post(world, path, valid).status_code == 200


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_a_client_who_leaves_a_stream_ends_its_generation(world: World, path: str, body: dict[str, Any]) -> None:
    long = body | {"stream": True} | dict.fromkeys(("max_tokens", "max_output_tokens"), 200)
    with httpx.stream(
        "POST", world.url + path, json=long, headers=world.headers, verify=TLS, trust_env=False
    ) as answer:
        next(answer.iter_text())
    world.wait_for("the end of the request", lambda status: status["in_flight"] <= 1)
