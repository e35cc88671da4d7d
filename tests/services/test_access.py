import asyncio
import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from infra.consent import subject_of
from infra.keys import ROLES, add_key, bring_keys, revoke_key, sha256_of
from services.access import (
    MAX_DEPTH,
    Admission,
    Caller,
    Keys,
    Refusal,
    check_limits,
    describe_origin,
    parse_body,
    wants_steps,
)

FIRST, SECOND = "first-key-123", "second-key-123"
SECRET = b"s" * 32
KEY = Caller(sha256_of(FIRST), "client")
OTHER = Caller(sha256_of(SECOND), "client", "full")
OPERATOR = Caller(sha256_of("third-key-123"), "operator")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    if body == b"fail":
        raise RuntimeError("the password is swordfish")
    await JSONResponse({"id": request.headers.getlist("x-request-id")})(scope, receive, send)


def ask(
    admission: Admission,
    path: str = "/v1/models",
    headers: Sequence[tuple[str, str]] = (),
    content: bytes = b"",
) -> tuple[int, Any, dict[str, str]]:
    """Send one request through the layer and return status, JSON and headers."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in [("Host", "localhost"), *headers]]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b""}
    asyncio.run(admission.around(echo)(scope, receive, send))
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent)), head


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a home with two clients' keys."""
    bring_keys(tmp_path / "keys.json", [(FIRST, KEY.log), (SECOND, OTHER.log)])
    return tmp_path / "keys.json"


@pytest.fixture
def open_admission(tmp_path: Path) -> Admission:
    """What stands before a service on loopback for which no client's key was made."""
    return Admission(Keys(tmp_path / "none.json", loopback=True))


def identify(keys: Keys, authorization: str | None, path: str = "/v1/models", host: str = "localhost") -> Caller | None:
    headers = {"host": host} if authorization is None else {"host": host, "authorization": authorization}
    return keys.identify(Headers(headers), path)


def refusal_of(keys: Keys, authorization: str | None, path: str = "/v1/models", host: str = "localhost") -> Any:
    with pytest.raises(Refusal) as refused:
        identify(keys, authorization, path, host)
    return refused.value.status, refused.value.code


def test_a_known_key_is_identified_and_anything_else_is_401(file: Path) -> None:
    keys = Keys(file, loopback=True)
    assert identify(keys, "Bearer first-key-123") == KEY
    assert identify(keys, "bearer  second-key-123") == OTHER
    for sent in (None, "", "first-key-123", "Basic first-key-123", "Bearer first-key-12", "Bearer \u00e9"):
        assert refusal_of(keys, sent) == (401, "invalid_api_key")


def test_each_role_reaches_its_own_paths_and_what_is_not_named_is_the_operators(file: Path) -> None:
    keys = {role: f"Bearer {add_key(file, role, role)}" for role in ROLES}
    known = Keys(file, loopback=False)
    reached = {"/v1/models": {"client", "operator"}, "/metrics": {"scraper", "operator"}}
    for path in ("/v1/models", "/metrics", "/redraft/status", "/redraft/new", "/nothing", "/v1"):
        for role in ROLES:
            if role in reached.get(path, {"operator"}):
                assert identify(known, keys[role], path, "redraft.example").role == role
            else:
                assert refusal_of(known, keys[role], path) == (403, "wrong_role")


def test_a_browser_opens_the_dashboard_with_an_operators_key_as_password_and_nothing_else(file: Path) -> None:
    operator = add_key(file, "me", "operator")
    admission, page = Admission(Keys(file, loopback=True)), "/redraft/dashboard"

    def basic(sent: str) -> list[tuple[str, str]]:
        return [("Authorization", f"Basic {base64.b64encode(sent.encode()).decode()}")]

    assert ask(admission, page, basic(f"me:{operator}"))[0] == 200
    assert ask(admission, page, basic(f":{operator}"))[0] == 200
    assert ask(admission, page, [bearer(operator)])[0] == 200
    assert ask(admission, page, basic(f"me:{FIRST}"))[0] == 403
    for sent in ([], basic(operator), basic(f"{operator}:me"), [("Authorization", "Basic \u00e9")], [bearer("x")]):
        status, _, headers = ask(admission, page, sent)
        assert (status, headers["www-authenticate"]) == (401, 'Basic realm="redraft", charset="UTF-8"')
    for path in ("/redraft/status", "/redraft/speculation", "/v1/models", f"{page}/"):
        status, _, headers = ask(admission, path, basic(f"me:{operator}"))
        assert (status, headers["www-authenticate"]) == (401, "Bearer")


def test_keys_that_are_made_and_revoked_count_at_the_next_request(file: Path) -> None:
    keys = Keys(file, loopback=True)
    made = f"Bearer {add_key(file, 'late', 'client', 'none')}"
    assert identify(keys, made).log == "none"
    revoke_key(file, "late")
    assert refusal_of(keys, made) == (401, "invalid_api_key")
    assert identify(keys, "Bearer first-key-123") == KEY


def test_a_file_that_is_torn_or_gone_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(file, loopback=True)
    for broken in (lambda: file.write_text('{"keys": ['), file.unlink):
        broken()
        assert identify(keys, "Bearer first-key-123") == KEY
        assert refusal_of(keys, None) == (401, "invalid_api_key")
    assert len(caplog.records) == 2
    with pytest.raises(ValueError, match="does not hold keys"):
        file.write_text("[]")
        Keys(file, loopback=True)


def test_on_loopback_a_client_needs_no_key_until_one_was_made_and_an_operator_always_does(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys, elsewhere = Keys(file, loopback=True), Keys(file, loopback=False)
    operator = f"Bearer {add_key(file, 'me', 'operator')}"
    assert identify(keys, None) is None
    assert identify(keys, "Bearer none") is None  # the stock client always sends one
    assert identify(keys, operator).role == "operator"
    assert refusal_of(elsewhere, None) == (401, "invalid_api_key")
    for path in ("/redraft/status", "/redraft/speculation", "/metrics"):
        assert refusal_of(keys, None, path) == (401, "invalid_api_key")
    add_key(file, "first", "client")
    revoke_key(file, "first")
    assert refusal_of(keys, None) == (401, "invalid_api_key")  # revoking the last key opens nothing


def test_without_a_key_the_machine_must_be_asked_by_its_own_name(tmp_path: Path, file: Path) -> None:
    keys = Keys(tmp_path / "none.json", loopback=True)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000", "[::1]"):
        assert identify(keys, None, host=host) is None
    for host in ("", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1:80", "localhost:x"):
        assert refusal_of(keys, None, host=host) == (403, "foreign_host")
    assert identify(Keys(file, loopback=True), "Bearer first-key-123", host="redraft.example") == KEY


def test_with_keys_every_path_but_healthz_needs_one(file: Path) -> None:
    admission = Admission(Keys(file, loopback=True))
    for path in ("/v1/models", "/metrics", "/redraft/status", "/nothing"):
        status, body, headers = ask(admission, path)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
    assert ask(admission, "/healthz")[0] == 200
    assert ask(admission, headers=[bearer(FIRST)])[0] == 200
    status, body, _ = ask(admission, "/redraft/status", headers=[bearer(FIRST)])
    assert (status, body["error"]["type"]) == (403, "permission_error")
    assert admission.responses == {401: 4, 200: 2, 403: 1}
    assert admission.in_flight == 0


def test_the_request_id_is_ours(open_admission: Admission) -> None:
    _, body, headers = ask(open_admission, headers=[("X-Request-Id", "mine\u00e9")])
    assert body["id"] == [headers["x-redraft-request"]]
    assert len(headers["x-redraft-request"]) == 32


def test_the_text_of_an_unforeseen_failure_never_reaches_the_client_nor_the_log(
    open_admission: Admission, caplog: pytest.LogCaptureFixture
) -> None:
    status, body, _ = ask(open_admission, content=b"fail")
    assert (status, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "internal_error")
    assert "swordfish" not in json.dumps(body) + caplog.text
    assert "RuntimeError" in caplog.text
    assert open_admission.in_flight == 0


def test_while_draining_new_requests_are_503_and_health_is_still_answered(open_admission: Admission) -> None:
    open_admission.draining = True
    status, _, headers = ask(open_admission)
    assert (status, headers["retry-after"]) == (503, "5")
    assert ask(open_admission, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    ],
    ids=[
        "empty",
        "cut",
        "array",
        "number",
        "NaN",
        "Infinity",
        "1e999",
        "surrogate",
        "UTF-8",
        "digits",
        "deep",
        "limit",
    ],
)
def test_what_is_not_strict_json_is_400(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        parse_body("application/json", body)
    assert refused.value.status == 400
    assert len(refused.value.message) < 300


def test_a_body_nested_as_deep_as_the_limit_is_parsed() -> None:
    deepest = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_body("application/json", deepest) == json.loads(deepest)


def test_a_body_must_be_declared_as_json() -> None:
    assert parse_body("application/json; charset=utf-8", b'{"a": 1}') == {"a": 1}
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        with pytest.raises(Refusal) as refused:
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
    with pytest.raises(Refusal) as refused:
        check_limits(body)
    assert refused.value.status == 400
    assert refused.value.param == next(iter(body))


def test_ordinary_settings_pass_the_limits() -> None:
    check_limits(
        {"min_p": 0, "logit_bias": {}, "n": 16, "best_of": None, "stop": "end", "prompt": [1] * 500, "temperature": 0.7}
    )


def origin(headers: dict[str, str], body: dict[str, Any], key: Caller | None = None) -> Any:
    return describe_origin("id", Headers(headers), body, key, SECRET)


@pytest.mark.parametrize(
    ("header", "store", "key", "wanted"),
    [
        (None, None, None, "metadata"),
        ("full", None, None, "full"),
        (None, True, None, "full"),
        ("full", False, None, "none"),
        ("FULL", None, None, "none"),
        ("", None, None, "none"),
        ("full", "yes", None, "none"),
        ("metadata", True, OTHER, "metadata"),
        (None, None, OTHER, "full"),
    ],
)
def test_the_stricter_consent_wins(header: str | None, store: Any, key: Caller | None, wanted: str) -> None:
    headers = {} if header is None else {"X-Redraft-Log": header}
    assert origin(headers, {} if store is None else {"store": store}, key).consent == wanted


def test_a_consent_header_sent_twice_is_none() -> None:
    twice = Headers(raw=[(b"x-redraft-log", b"full"), (b"x-redraft-log", b"full")])
    assert describe_origin("id", twice, {}, None, SECRET).consent == "none"


@pytest.mark.parametrize("domain", ["", "Chat", "a b", "a/../b", "a" * 33, "caf\u00e9", "a\r\nb"])
def test_a_malformed_domain_is_400(domain: str) -> None:
    with pytest.raises(Refusal, match="X-Redraft-Domain"):
        describe_origin("id", Headers(raw=[(b"x-redraft-domain", domain.encode("latin-1"))]), {}, None, SECRET)
    assert origin({"X-Redraft-Domain": "text-to_sql2"}, {}).domain == "text-to_sql2"
    assert origin({}, {}).domain == "default"


def test_the_figures_of_each_step_are_told_to_operators_who_ask_for_them() -> None:
    asks = Headers({"X-Redraft-Detail": "steps"})
    assert wants_steps(asks, OPERATOR)
    assert not wants_steps(Headers(), OPERATOR)
    for other in (None, KEY, Caller("a-key-1234", "scraper")):
        with pytest.raises(Refusal, match="for operators") as refused:
            wants_steps(asks, other)
        assert (refused.value.status, refused.value.code) == (403, "wrong_role")
    with pytest.raises(Refusal, match='X-Redraft-Detail is "yes", wanted steps'):
        wants_steps(Headers({"X-Redraft-Detail": "yes"}), OPERATOR)


def test_a_subject_is_a_hash_that_differs_by_user_and_by_key() -> None:
    subjects = {subject_of("k1", None), subject_of("k1", "ann"), subject_of("k2", "ann"), subject_of(None, "ann")}
    assert len(subjects) == 4
    assert all(subject is not None and len(subject) == 64 for subject in subjects)
    assert subject_of("k1", "ann") == subject_of("k1", "ann")
    assert subject_of(None, None) is None
    assert origin({}, {"user": "ann"}).subject == subject_of(None, "ann")


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
    with pytest.raises(Refusal, match="X-Redraft-Group: a group is named by 1 to 128 printable") as refused:
        describe_origin("id", headers, {}, None, SECRET)
    assert (refused.value.status, refused.value.param) == (400, "X-Redraft-Group")
    assert "secr" not in refused.value.message


def test_a_request_may_say_how_it_is_drafted_but_nothing_else() -> None:
    def said(value: str | None) -> str:
        headers = Headers({} if value is None else {"X-Redraft-Speculation": value})
        return describe_origin("0" * 32, headers, {}, None, SECRET).speculation

    assert [said(value) for value in (None, "on", "off", "head")] == ["on", "on", "off", "head"]
    with pytest.raises(Refusal, match='X-Redraft-Speculation is "fast", wanted on, off or head') as refused:
        said("fast")
    assert refused.value.status == 400
