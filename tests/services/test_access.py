import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from infra.keys import ROLES, add_key, bring_keys, revoke_key, sha256_of
from services.access import OPEN_PATHS, Admission, Caller, Keys, RequestError
from tests.services import asgi

FIRST, SECOND = "first-key-123", "second-key-123"
KEY = Caller(sha256_of(FIRST), "client")
OTHER = Caller(sha256_of(SECOND), "client", "full")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    if await request.body() == b"fail":
        raise RuntimeError("the password is swordfish")
    await JSONResponse({"id": request.headers.getlist("x-request-id")})(scope, receive, send)


def ask(
    admission: Admission, path: str = "/v1/models", headers: Sequence[tuple[str, str]] = (), content: bytes = b""
) -> tuple[int, Any, Headers]:
    """Send one request through the layer and return status, JSON and headers."""
    answer = asyncio.run(asgi.ask(admission.around(echo), [content], path, [("Host", "localhost"), *headers]))
    return answer.status, json.loads(answer.body), answer.headers


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
    with pytest.raises(RequestError) as refused:
        identify(keys, authorization, path, host)
    return refused.value.status, refused.value.code


def test_a_known_key_is_identified_and_anything_else_is_401(file: Path) -> None:
    keys = Keys(file, loopback=True)
    assert [identify(keys, sent) for sent in (f"Bearer {FIRST}", f"bearer  {SECOND}")] == [KEY, OTHER]
    for sent in (None, "", FIRST, f"Basic {FIRST}", "Bearer first-key-12", "Bearer \u00e9"):
        assert refusal_of(keys, sent) == (401, "invalid_api_key")


def test_each_role_reaches_its_own_paths_and_what_is_not_named_is_the_operators(file: Path) -> None:
    keys = {role: f"Bearer {add_key(file, role, role)}" for role in ROLES}
    known = Keys(file, loopback=False)
    reached = {"/metrics": {"scraper", "operator"}}
    reached |= {key: {"client", "operator"} for key in ("/v1/models", "/tokenize", "/detokenize", "/version")}
    for path in (*reached, "/redraft/status", "/redraft/new", "/nothing", "/v1"):
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
        assert identify(keys, f"Bearer {FIRST}") == KEY
        assert refusal_of(keys, None) == (401, "invalid_api_key")
    assert len(caplog.records) == 2
    file.write_text("[]")
    with pytest.raises(ValueError, match="does not hold keys"):
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


def test_with_keys_every_path_but_the_probes_needs_one_and_the_id_of_a_request_is_ours(file: Path) -> None:
    admission = Admission(Keys(file, loopback=True))
    for path in ("/v1/models", "/metrics", "/redraft/status", "/nothing"):
        status, body, headers = ask(admission, path)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert headers["www-authenticate"] == "Bearer"
    assert [ask(admission, path)[0] for path in OPEN_PATHS] == [200, 200]
    status, body, headers = ask(admission, headers=[bearer(FIRST), ("X-Request-Id", "mine\u00e9")])
    assert (status, body["id"], len(body["id"][0])) == (200, [headers["x-redraft-request"]], 32)
    status, body, _ = ask(admission, "/redraft/status", headers=[bearer(FIRST)])
    assert (status, body["error"]["type"]) == (403, "permission_error")
    assert admission.responses == {401: 4, 200: 3, 403: 1}
    assert admission.in_flight == 0


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/models", {"type": "server_error", "param": None, "code": "internal_error"}),
        ("/v1/messages", {"type": "api_error"}),
    ],
)
def test_the_text_of_an_unforeseen_failure_never_reaches_the_client_nor_the_log(
    open_admission: Admission, path: str, told: dict[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    status, body, _ = ask(open_admission, path, content=b"fail")
    assert (status, body["error"]) == (500, told | {"message": body["error"]["message"]})
    assert "swordfish" not in json.dumps(body) + caplog.text
    assert "RuntimeError" in caplog.text
    assert open_admission.in_flight == 0


def test_while_draining_new_requests_are_503_and_probes_are_still_answered(open_admission: Admission) -> None:
    open_admission.draining = True
    status, _, headers = ask(open_admission)
    assert (status, headers["retry-after"]) == (503, "5")
    assert [ask(open_admission, path)[0] for path in OPEN_PATHS] == [200, 200]


def test_anthropics_header_is_a_key_on_its_own_paths_and_only_where_no_other_is_sent(file: Path) -> None:
    keys = Keys(file, loopback=True)

    def asked(path: str, **sent: str) -> Any:
        headers = Headers({"host": "localhost", **{name.replace("_", "-"): value for name, value in sent.items()}})
        try:
            return keys.identify(headers, path)
        except RequestError as refusal:
            return refusal.status

    assert asked("/v1/messages", x_api_key=FIRST) == asked("/v1/messages/count_tokens", x_api_key=FIRST) == KEY
    assert asked("/v1/chat/completions", x_api_key=FIRST) == asked("/redraft/status", x_api_key=FIRST) == 401
    assert asked("/v1/messages", x_api_key=FIRST, authorization=f"Bearer {SECOND}") == OTHER
    assert asked("/v1/messages", x_api_key=FIRST, authorization="Bearer wrong") == 401
    assert asked("/v1/messages", x_api_key="") == asked("/v1/messages") == 401


def test_a_refusal_has_the_shape_of_its_paths_api(file: Path) -> None:
    _, told, _ = ask(Admission(Keys(file, loopback=True)), "/v1/responses")
    assert told["error"].keys() == {"message", "type", "param", "code"}
    kinds = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large"}
    for status, kind in {**kinds, 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}.items():
        told = RequestError(status, "no").body("/v1/messages/count_tokens")
        assert told == {"type": "error", "error": {"type": kind, "message": "no"}}
