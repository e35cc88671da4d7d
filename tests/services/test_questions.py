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

SECRET = b"s" * 32
KEY = Caller(sha256_of("first-key-123"), "client")
OTHER = Caller(sha256_of("second-key-123"), "client", "full")
OPERATOR = Caller(sha256_of("third-key-123"), "operator")


def nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        *((body, "application/json", 400) for body in (b"", b"{", b"[]", b"1")),
        *((b'{"a": %b}' % value, "application/json", 400) for value in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000)),
        *((b'{"a": %b}' % text, "application/json", 400) for text in (b'"\\ud800"', b'"\xff"')),
        *((nested(depth), "application/json", 400) for depth in (MAX_DEPTH, 200_000)),
        *((b"{}", kind, 415) for kind in ("", "text/plain", "application/x-www-form-urlencoded")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_strict_json_or_not_declared_as_json_is_refused(body: bytes, kind: str, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        parse_body(kind, body)
    assert refused.value.status == status
    assert len(refused.value.message) < 300


def test_a_body_nested_as_deep_as_the_limit_is_parsed() -> None:
    deepest = nested(MAX_DEPTH - 1)
    assert parse_body("application/json; charset=utf-8", deepest) == json.loads(deepest)


CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
ROOT = [{"role": "user", "content": "x"}, {"role": "root", "content": "x"}]
REFUSED = {
    "/v1/chat/completions": [
        {"min_p": 0.1},
        {"min_p": "0.1"},
        {"logit_bias": {"5": 1}},
        {"use_beam_search": True},
        {"kv_transfer_params": {"a": 1}},
        {"priority": -5},
        *({"n": value} for value in (0, 17, "10000")),
        {"best_of": 2.5},
        {"stop": ["a"] * 17},
        *({"prompt": [one] * 17} for one in ("a", [5])),
        {"bad_words": ["a"] * 65},
        {"messages": ROOT},
    ],
    "/v1/responses": [
        {"conversation": {"id": "conv_1"}},
        {"prompt": {"id": "pmpt_1"}},
        *({"tools": [{"type": kind}]} for kind in ("mcp", "web_search")),
        {"logit_bias": {"5": 1}},
        {"min_p": 0.5},
        {"stop": ["a"] * 17},
        {"input": ROOT},
        {"input": [CALL | {"arguments": "[1"}]},
    ],
    "/v1/messages": [{"stop_sequences": ["a"] * 17}, {"messages": ROOT}, {"vllm_xargs": {"a": 1}}],
}
SERVED = {
    "/v1/chat/completions": {"min_p": 0, "logit_bias": {}, "n": 16, "best_of": None, "stop": "x", "prompt": [1] * 500},
    "/v1/responses": {"input": [ROOT[0], CALL, OUTPUT], "store": False, "tools": [{"type": "function", "name": "a"}]},
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, told in REFUSED.items() for body in told], ids=str)
def test_what_would_be_ignored_or_take_everything_is_400_by_its_name(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check_limits(as_chat(path, body))
    assert (refused.value.status, refused.value.param) == (400, next(iter(body)))


@pytest.mark.parametrize(("path", "body"), SERVED.items())
def test_ordinary_settings_and_items_pass_the_limits(path: str, body: dict[str, Any]) -> None:
    check_limits(as_chat(path, body))


def test_what_an_api_does_not_read_counts_for_nothing_in_it() -> None:
    """A client could tell one limit to what counts tokens and another one to the engine."""
    body = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 900, "n": 4, "prompt": [], "input": "x"}
    said = as_chat("/v1/responses", body)
    assert (said["max_tokens"], said.keys() & {"max_completion_tokens", "n", "prompt"}) == (900, set())
    said = as_chat("/v1/messages/count_tokens", {**body, "max_tokens": 700, "messages": []})
    assert (said["max_tokens"], said.keys() & {"max_completion_tokens", "n", "prompt", "input"}) == (700, set())
    assert as_chat("/v1/chat/completions", body) is body


def test_whom_a_message_is_for_is_named_by_its_metadata() -> None:
    body = {"metadata": {"user_id": "ada"}, "user": "bob", "store": True, "messages": []}
    named = origin({}, dict(as_chat("/v1/messages", body)), KEY)
    assert (named.subject, named.consent) == (subject_of(KEY.key, "ada"), "full")
    assert origin({}, dict(as_chat("/v1/responses", {"metadata": {"user_id": "ada"}})), KEY).subject == named.key


def origin(headers: dict[str, str], body: dict[str, Any], key: Caller | None = None) -> Any:
    return describe_origin("id", Headers(headers), body, key, SECRET)


@pytest.mark.parametrize(
    ("headers", "body", "key", "wanted"),
    [
        ({}, {}, None, "metadata"),
        ({"X-Redraft-Log": "full"}, {}, None, "full"),
        ({}, {"store": True}, None, "full"),
        ({}, {}, OTHER, "full"),
    ],
)
def test_header_body_and_key_each_have_a_say(
    headers: dict[str, str], body: dict[str, Any], key: Caller | None, wanted: str
) -> None:
    assert origin(headers, body, key).consent == wanted


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


def test_every_field_of_openai_that_names_a_person_names_the_subject_and_a_key_has_one_hash() -> None:
    ann, bob, nobody = (subject_of(KEY.key, name) for name in ("ann", "bob", None))
    assert len({ann, bob, nobody, subject_of(None, "ann"), origin({}, {}, OTHER).key}) == 5
    assert (subject_of(None, None), len(ann or "")) == (None, 64)
    for field in ("user", "safety_identifier"):
        found = [origin({}, {field: name}, KEY) for name in ("ann", "", None)]
        assert [(one.subject, one.key) for one in found] == [(ann, nobody), (nobody, nobody), (nobody, nobody)]
        with pytest.raises(RequestError, match=f"{field} is a int, wanted a text") as refused:
            origin({}, {field: 7})
        assert refused.value.param == field
    both = origin({}, {"user": "bob", "safety_identifier": "ann"}, KEY)
    assert (both.subject, both.aliases) == (ann, (bob,))
    assert origin({}, {"user": "ann", "safety_identifier": "ann"}, KEY).aliases == ()
    without = origin({}, {"user": "ann"})
    assert (without.subject, without.key) == (subject_of(None, "ann"), None)


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
    asked = [{}, *({"X-Redraft-Speculation": way} for way in ("on", "off", "head"))]
    assert [origin(headers, {}).speculation for headers in asked] == ["on", "on", "off", "head"]
    with pytest.raises(RequestError, match='X-Redraft-Speculation is "fast", wanted on, off or head') as refused:
        origin({"X-Redraft-Speculation": "fast"}, {})
    assert refused.value.status == 400


def test_a_keys_made_up_domains_hide_nobody_elses_and_none_at_all_never_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_DOMAINS", 2)
    domains = Domains()
    admitted = [domains.admit("flooder", f"junk-{number}") for number in range(64)]
    assert admitted == ["junk-0", "junk-1"] + [OTHER_DOMAINS] * 62
    assert domains.admit("flooder", "junk-1") == "junk-1"
    assert domains.admit("other", "code") == domains.admit(None, "code") == "code"
    assert domains.admit("other", "junk-2") == "junk-2"
    assert [domains.admit("flooder", name) for name in ("code", "default", "other")] == [
        OTHER_DOMAINS,
        "default",
        "other",
    ]
