"""Who may ask: the ASGI layer in front of every route.

Nothing that a client sends reaches a handler before its key was checked, and no body is read before
(services/http_server.py). Each request gets an id of ours: one chosen by a client could collide with another's and mix
up their log rows. A failure that nobody foresaw becomes a bare 500 here; its text goes to the log only.
"""

import base64
import hmac
import ipaddress
import logging
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.consent import Consent
from infra.keys import Key, Role, read_keys, sha256_of
from services.failures import place_of

OPEN_PATHS = ("/health", "/readyz")
# Whose keys reach a path, by its start; the others are the operators'.
CLIENTS: tuple[Role, ...] = ("client", "operator")
OPERATORS: tuple[Role, ...] = ("operator",)
ROLES_OF: dict[str, tuple[Role, ...]] = {
    **dict.fromkeys(("/v1/", "/tokenize", "/detokenize", "/version"), CLIENTS),
    "/metrics": ("scraper", "operator"),
}
# Anthropic's API: the paths that begin so have its header for the key and its shape of errors.
MESSAGES = "/v1/messages"
# A page is opened by a browser, which asks its user for a password and sends that on this path alone.
PAGE_PATH = "/redraft/dashboard"
# What of a request's headers reaches a handler, and what an answer has beyond HTTP's own.
REQUEST_HEADERS = {
    "Authorization": "`Bearer KEY`, on every path but `/health` and `/readyz`. On loopback `/v1` needs none until a "
    "client's key is made. `/redraft/dashboard` also takes a browser's `Basic`, with any name and the key as password.",
    "Content-Type": "`application/json`, required with a body.",
    "Host": "As in HTTP. Without a key it must be a name of this machine.",
    "X-Api-Key": "The key on `/v1/messages`, as Anthropic's clients send it, where `Authorization` is not sent.",
    "X-Redraft-Detail": "`steps` adds what was drafted and accepted in each step to `usage.redraft`; operators only.",
    "X-Redraft-Domain": "The kind of traffic, 1 to 32 of `a-z`, `0-9`, `_` and `-`; `default` without it. What "
    "a key names beyond its first 16 counts for `other`.",
    "X-Redraft-Group": "What the request belongs with, such as a chat, a file or a ticket: 1 to 128 printable ASCII "
    "characters without a space. Requests of one key with one group are never split between what drafts learn from and "
    "what they are measured by; a group of more than 20 rows and a quarter of its domain counts as none. Only a keyed "
    "hash is kept, of requests whose text may be logged.",
    "X-Redraft-Log": "What may be logged: `none`, `metadata` (figures only) or `full`. The strictest of this header, "
    "OpenAI's `store` and the key's policy wins; a malformed value means `none`; without any it is `metadata`.",
    "X-Redraft-Reasoning": "How a small model and the target are to answer a chat in turn, `spec_reason` or "
    "`speculative_thinking`, where the recipe has a small model. `usage.redraft` of such an answer says that it is not "
    "`lossless`, and who wrote how much. Nothing of it is logged.",
    "X-Redraft-Speculation": "`on`, as the service finds it fastest, which is the default; `off`; or `head`: by the "
    "draft alone, as many tokens as it was gated at, to measure a draft; the service counts no acceptance by it.",
}
RESPONSE_HEADERS = {
    "X-Redraft-Request": "Id of the request, as in the service's log.",
    "WWW-Authenticate": "With a 401: `Bearer`, of `/redraft/dashboard` `Basic`.",
    "Retry-After": "With a 429 or 503: seconds to wait.",
}
# On every answer that a replica gave, so that one which Serve made up is told apart.
ANSWER_MARK = b"x-redraft-request"
KEPT_HEADERS = tuple(name.lower().encode() for name in REQUEST_HEADERS)

log = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that is answered with an error; the message is meant for the client."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, challenge: str = "Bearer"
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self._challenge = status, message, param, code, challenge

    def response(self, path: str = "") -> JSONResponse:
        """Return it in the shape of a path's API."""
        headers = {
            401: {"WWW-Authenticate": self._challenge},
            408: {"Connection": "close"},  # the rest of the body may never come
            429: {"Retry-After": "1"},
            503: {"Retry-After": "5"},
        }
        return JSONResponse(self.body(path), self.status, headers.get(self.status))

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error's JSON, in OpenAI's shape or in Anthropic's."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        if path.startswith(MESSAGES):
            kinds = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
            return {"type": "error", "error": {"type": kinds.get(self.status, kind), "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


INTERNAL_ERROR = RequestError(500, "the server failed to answer this request", code="internal_error")
UNAVAILABLE = RequestError(503, "the engine is not running; it is being restarted", code="engine_unavailable")


class Caller(NamedTuple):
    """Who asks; `key` is the hash that the key is known by, so that an erasure can name who asked with it."""

    key: str
    role: Role
    log: Consent | None = None


class Keys:
    """The accepted keys, read again when their file changed; where it can't be read, those read before go on."""

    def __init__(self, file: Path, loopback: bool) -> None:
        """Read the keys of a home's file, or ValueError; on loopback a client needs none until one was made."""
        self._file, self._loopback = file, loopback
        self._seen, self._keys = self._stamp(), read_keys(file)

    def identify(self, headers: Headers, path: str) -> Caller | None:
        """Return who asks, None for somebody without a key where none is needed; RequestError 401 or 403.

        Every key is compared, over digests of one length, so that the time tells nothing about any of them. A web page
        can have its own name lead to loopback, but can't hide that name.
        """
        self._refresh()
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        scheme, sent, challenge = scheme.lower(), sent.strip(), "Bearer"
        if path == PAGE_PATH:
            challenge = 'Basic realm="redraft", charset="UTF-8"'
            if scheme == "basic":
                scheme, sent = "bearer", _password(sent)
        if path.startswith(MESSAGES) and "authorization" not in headers:
            scheme, sent = "bearer", headers.get("x-api-key", "").strip()
        found = self._find(sha256_of(sent))
        roles = next((roles for start, roles in ROLES_OF.items() if path.startswith(start)), OPERATORS)
        if found is not None and scheme == "bearer":
            if found.role not in roles:
                raise RequestError(403, f"this path is not for {found.role}s' keys", code="wrong_role")
            return Caller(found.sha256, found.role, found.log)
        if "client" not in roles or not self._loopback or any(key.role == "client" for key in self._keys):
            message = "a valid API key is required: Authorization: Bearer <key>"
            raise RequestError(401, message, code="invalid_api_key", challenge=challenge)
        if not _is_own_name(headers.get("host", "")):
            raise RequestError(403, "without a key this machine is asked by its own name", "Host", "foreign_host")
        return None

    def caller(self, headers: Headers) -> Caller | None:
        """Return who asks a server elsewhere, which has keys of its own: by the policy of a key that is ours too."""
        self._refresh()
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not sent.strip():
            return None
        digest = sha256_of(sent.strip())
        found = self._find(digest)
        return Caller(digest, "client", None if found is None else found.log)

    def _find(self, digest: str) -> Key | None:
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest) and key.accepted]
        return found[-1] if found else None

    def _refresh(self) -> None:
        if (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        try:
            if stamp is None:
                raise ValueError(f"{self._file} is gone")
            self._keys = read_keys(self._file)
        except (OSError, ValueError) as error:
            log.warning("the keys stay as they were: %s", error)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


class Admission:
    """ASGI middleware: id, key, counts, and an answer to what nobody caught.

    What a route puts into the scope's "redraft.at_end" is called when its answer is sent, failed or called off.
    `draining` is set to refuse new requests while the running ones end.
    """

    def __init__(self, keys: Keys) -> None:
        self.responses, self.in_flight, self.draining = Counter[int](), 0, False
        self._keys = keys

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind this layer, as a function, which uvicorn knows to be an app."""

        async def admit(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(app, scope, receive, send)

        return admit

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        request_id, started, ended = uuid.uuid4().hex, False, False

        async def counted(message: Message) -> None:
            nonlocal started, ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                started = True
                self.responses[message["status"]] += 1
                message["headers"] = [*message.get("headers", []), (ANSWER_MARK, request_id.encode())]
            await send(message)

        self.in_flight += 1
        at_end: list[Callable[[], None]] = []
        try:
            if scope["path"] not in OPEN_PATHS:
                if self.draining:
                    raise RequestError(503, "the service is shutting down; ask again in a few seconds", code="draining")
                scope["redraft.caller"] = self._keys.identify(Headers(scope=scope), scope["path"])
            scope["headers"] = [*known(scope["headers"]), (b"x-request-id", request_id.encode())]
            scope["redraft.id"], scope["redraft.at_end"] = request_id, at_end
            await app(scope, receive, counted)
        except RequestError as refusal:
            if started:
                raise
            await refusal.response(scope["path"])(scope, receive, counted)
        except Exception as error:
            log.error("request %s failed: %s", request_id, place_of(error))  # noqa: TRY400 - its text may quote the request
            if not started:
                await INTERNAL_ERROR.response(scope["path"])(scope, receive, counted)
            elif not ended:
                raise  # the server must cut the connection: a body that just stopped would look whole
        finally:
            self.in_flight -= 1
            for call in at_end:
                call()


def known(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that mean something here: others steer Serve or the engine from outside."""
    return [(name, value) for name, value in headers if name.lower() in KEPT_HEADERS]


def _password(sent: str) -> str:
    """Return the password of HTTP's basic scheme (RFC 7617), "" for what is not of its form."""
    try:
        return base64.b64decode(sent, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _is_own_name(host: str) -> bool:
    """Whether a Host header names this machine's loopback, with any port."""
    name = host.rpartition(":")[0] if re.fullmatch(r".*:[0-9]+", host) else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
