"""What may be asked, request by request, without a service."""

import json
import re
from typing import Any

import pytest
from starlette.datastructures import Headers

from infra.consent import OTHER_DOMAINS, subject_of
from infra.keys import sha256_of
from services import questions
from services.access import Caller, RequestError
from services.questions import MAX_DEPTH, Domains, as_chat, check_limits, describe_origin, parse_body, wants_steps

FIRST, SECOND = "first-key-123", "second-key-123"
SECRET = b"s" * 32
KEY = Caller(sha256_of(FIRST), "client")
OTHER = Caller(sha256_of(SECOND), "client", "full")
OPERATOR = Caller(sha256_of("third-key-123"), "operator")


NO_JSON = {
    "empty": b"",
    "cut": b"{",
    "array": b"[]",
    "number": b"1",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "1e999": b'{"a": 1e999}',
    "surrogate": b'{"a": "\\ud800"}',
    "UTF-8": b'{"a": "\xff"}',
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "deep": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "limit": b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
}


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON.keys())
def test_what_is_not_strict_json_is_400(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse_body("application/json", body)
    assert refused.value.status == 400
    assert len(refused.value.message) < 300


def test_a_body_nested_as_deep_as_the_limit_is_parsed() -> None:
    deepest = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_body("application/json", deepest) == json.loads(deepest)


def test_a_body_must_be_declared_as_json() -> None:
    assert parse_body("application/json; charset=utf-8", b'{"a": 1}') == {"a": 1}
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        with pytest.raises(RequestError) as refused:
            parse_body(kind, b"{}")
        assert refused.value.status == 415


@pytest.mark.parametrize(
    "body",
    [
        {"min_p": 0.1},
        {"min_p": "0.1"},
        {"logit_bias": {"5": 1}},
        {"use_beam_search": True},
        {"kv_transfer_params": {"a": 1}},
        {"priority": -5},
        {"n": 0},
        {"n": 17},
        {"n": "10000"},
        {"best_of": 2.5},
        {"stop": ["a"] * 17},
        {"prompt": ["a"] * 17},
        {"prompt": [[5]] * 17},
        {"bad_words": ["a"] * 65},
        {"messages": [{"role": "user", "content": "x"}, {"role": "root", "content": "x"}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_would_be_ignored_or_take_everything_is_400_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check_limits(body)
    assert refused.value.status == 400
    assert refused.value.param == next(iter(body))


def test_ordinary_settings_pass_the_limits() -> None:
    check_limits(
        {"min_p": 0, "logit_bias": {}, "n": 16, "best_of": None, "stop": "end", "prompt": [1] * 500, "temperature": 0.7}
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"conversation": {"id": "conv_1"}}, "conversation"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("/v1/responses", {"tools": [{"type": "mcp", "server_url": "http://a"}]}, "tools"),
        ("/v1/responses", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/responses", {"stop": ["a"] * 17}, "stop"),
        ("/v1/responses", {"input": [{"role": "root", "content": "x"}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call", "arguments": "[1"}]}, "input"),
        ("/v1/messages", {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ("/v1/messages", {"messages": [{"role": "root", "content": "x"}]}, "messages"),
        ("/v1/messages", {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
    ids=str,
)
def test_what_chats_refuse_is_refused_by_the_name_that_it_has_in_the_other_apis(
    path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        check_limits(as_chat(path, body))
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_an_api_does_not_read_counts_for_nothing_in_it() -> None:
    """A client could tell one limit to what counts tokens and another one to the engine."""
    body = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 900, "n": 4, "prompt": [], "input": "x"}
    said = as_chat("/v1/responses", body)
    assert (said["max_tokens"], said.keys() & {"max_completion_tokens", "n", "prompt"}) == (900, set())
    said = as_chat("/v1/messages/count_tokens", {**body, "max_tokens": 700, "messages": []})
    assert (said["max_tokens"], said.keys() & {"max_completion_tokens", "n", "prompt", "input"}) == (700, set())
    assert as_chat("/v1/chat/completions", body) is body


def test_ordinary_items_pass_the_limits_of_a_response() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    check_limits(as_chat("/v1/responses", {"input": [{"role": "user", "content": "x"}, call, output], "store": False}))
    check_limits(as_chat("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "add"}]}))


def test_whom_a_message_is_for_is_named_by_its_metadata() -> None:
    body = {"metadata": {"user_id": "ada"}, "user": "bob", "store": True, "messages": []}
    named = origin({}, dict(as_chat("/v1/messages", body)), KEY)
    assert (named.subject, named.consent) == (subject_of(KEY.key, "ada"), "full")
    assert origin({}, dict(as_chat("/v1/responses", {"metadata": {"user_id": "ada"}})), KEY).subject == named.key


def origin(headers: dict[str, str], body: dict[str, Any], key: Caller | None = None) -> Any:
    return describe_origin("id", Headers(headers), body, key, SECRET)


@pytest.mark.parametrize(
    ("header", "store", "key", "wanted"),
    [
        (None, None, None, "metadata"),
        ("full", None, None, "full"),
        (None, True, None, "full"),
        (None, None, OTHER, "full"),
    ],
)
def test_header_body_and_key_each_have_a_say(header: str | None, store: Any, key: Caller | None, wanted: str) -> None:
    headers = {} if header is None else {"X-Redraft-Log": header}
    assert origin(headers, {} if store is None else {"store": store}, key).consent == wanted


def test_a_consent_header_sent_twice_is_none() -> None:
    twice = Headers(raw=[(b"x-redraft-log", b"full"), (b"x-redraft-log", b"full")])
    assert describe_origin("id", twice, {}, None, SECRET).consent == "none"


@pytest.mark.parametrize("domain", ["", "Chat", "a b", "a/../b", "a" * 33, "caf\u00e9", "a\r\nb"])
def test_a_malformed_domain_is_400(domain: str) -> None:
    with pytest.raises(RequestError, match="X-Redraft-Domain"):
        describe_origin("id", Headers(raw=[(b"x-redraft-domain", domain.encode("latin-1"))]), {}, None, SECRET)
    assert origin({"X-Redraft-Domain": "text-to_sql2"}, {}).domain == "text-to_sql2"
    assert origin({}, {}).domain == "default"


def test_the_figures_of_each_step_are_told_to_operators_who_ask_for_them() -> None:
    asks = Headers({"X-Redraft-Detail": "steps"})
    assert wants_steps(asks, OPERATOR)
    assert not wants_steps(Headers(), OPERATOR)
    for other in (None, KEY, Caller("a-key-1234", "scraper")):
        with pytest.raises(RequestError, match="for operators") as refused:
            wants_steps(asks, other)
        assert (refused.value.status, refused.value.code) == (403, "wrong_role")
    with pytest.raises(RequestError, match='X-Redraft-Detail is "yes", wanted steps'):
        wants_steps(Headers({"X-Redraft-Detail": "yes"}), OPERATOR)


def test_a_subject_is_a_hash_that_differs_by_user_and_by_key() -> None:
    subjects = {subject_of("k1", None), subject_of("k1", "ann"), subject_of("k2", "ann"), subject_of(None, "ann")}
    assert len(subjects) == 4
    assert all(subject is not None and len(subject) == 64 for subject in subjects)
    assert subject_of("k1", "ann") == subject_of("k1", "ann")
    assert subject_of(None, None) is None
    assert origin({}, {"user": "ann"}).subject == subject_of(None, "ann")


def test_every_field_of_openai_that_names_a_person_names_the_subject() -> None:
    ann, bob = subject_of(KEY.key, "ann"), subject_of(KEY.key, "bob")
    for field in ("user", "safety_identifier"):
        assert origin({}, {field: "ann"}, KEY).subject == ann
        assert (
            origin({}, {field: ""}, KEY).subject == origin({}, {field: None}, KEY).subject == subject_of(KEY.key, None)
        )
        with pytest.raises(RequestError, match=f"{field} is a int, wanted a text") as refused:
            origin({}, {field: 7})
        assert refused.value.param == field
    both = origin({}, {"user": "bob", "safety_identifier": "ann"}, KEY)
    assert (both.subject, both.aliases) == (ann, (bob,))
    assert origin({}, {"user": "ann", "safety_identifier": "ann"}, KEY).aliases == ()


def test_a_key_has_one_hash_whoever_asks_with_it() -> None:
    assert {origin({}, {"user": user}, KEY).key for user in ("ann", "bob", None)} == {subject_of(KEY.key, None)}
    assert origin({}, {}, KEY).key != origin({}, {}, OTHER).key
    assert origin({}, {"user": "ann"}).key is None


def test_a_group_is_hashed_and_nobody_names_that_of_another_key() -> None:
    named = {"X-Redraft-Group": "ticket-7"}
    found = [origin(named, {}, key).group for key in (None, KEY, OTHER)]
    assert len(set(found)) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", group) for group in found)
    assert origin(named, {"user": "ann"}, KEY).group == found[1]  # persons of one key share its groups
    assert origin({}, {}, KEY).group is None


@pytest.mark.parametrize("named", [[b""], [b"my secret"], [b"secret" * 22], [b"secr\xe9t"], [b"secret", b"secret"]])
def test_a_malformed_group_is_400_and_not_repeated(named: list[bytes]) -> None:
    headers = Headers(raw=[(b"x-redraft-group", value) for value in named])
    with pytest.raises(RequestError, match="X-Redraft-Group: a group is named by 1 to 128 printable") as refused:
        describe_origin("id", headers, {}, None, SECRET)
    assert (refused.value.status, refused.value.param) == (400, "X-Redraft-Group")
    assert "secr" not in refused.value.message


def test_a_request_may_say_how_it_is_drafted_but_nothing_else() -> None:
    def said(value: str | None) -> str:
        headers = Headers({} if value is None else {"X-Redraft-Speculation": value})
        return describe_origin("0" * 32, headers, {}, None, SECRET).speculation

    assert [said(value) for value in (None, "on", "off", "head")] == ["on", "on", "off", "head"]
    with pytest.raises(RequestError, match='X-Redraft-Speculation is "fast", wanted on, off or head') as refused:
        said("fast")
    assert refused.value.status == 400


def test_a_keys_made_up_domains_hide_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_DOMAINS", 2)
    domains = Domains()
    assert [domains.admit("flooder", f"junk-{number}") for number in range(64)] == ["junk-0", "junk-1"] + [
        OTHER_DOMAINS
    ] * 62
    assert domains.admit("flooder", "junk-1") == "junk-1"
    assert domains.admit("other", "code") == domains.admit(None, "code") == "code"
    assert domains.admit("other", "junk-2") == "junk-2"
    assert domains.admit("flooder", "code") == OTHER_DOMAINS


def test_a_request_that_names_none_never_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_DOMAINS", 0)
    domains = Domains()
    assert [domains.admit("k", name) for name in ("default", "other", "chat")] == ["default", "other", "other"]
