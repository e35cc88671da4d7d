"""What a request may ask, whom it is from, and how many domains a key has."""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from starlette.datastructures import Headers

from infra.consent import (
    DEFAULT_DOMAIN,
    OTHER_DOMAINS,
    Consent,
    Domain,
    consent_level,
    group_of,
    parse_domain,
    subject_of,
    subjects_named,
)
from services.access import MESSAGES, Caller, RequestError

RESPONSES = "/v1/responses"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPECULATION = ("on", "off", "head")
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_PROMPTS = 16
MAX_BAD_WORDS = 64
# A JSON schema needs some; what is deeper overflows the stack of whoever walks it next.
MAX_DEPTH = 100
MAX_DOMAINS = 16  # of one key
# What of a request's JSON is refused by name, and with which words.
UNSUPPORTED = {
    "min_p": "min_p has no effect under speculative decoding; leave it out",
    "logit_bias": "logit_bias has no effect under speculative decoding; leave it out",
    "use_beam_search": "beam search is not served here",
    **{
        name: f"{name} is not accepted from clients"
        for name in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority")
    },
}
# What of a response's request needs one that is stored, and is refused.
STORED = ("background", "conversation", "previous_response_id", "previous_input_messages", "prompt")
TOOLS = ("function", "custom", "namespace")  # that vLLM shows the target; it drops the others


class Origin(NamedTuple):
    """What is known of a request before it runs; `subject`, `key` and `group` are hashes, None if nothing was named."""

    request_id: str
    domain: str
    consent: Consent
    subject: str | None
    key: str | None = None
    speculation: str = "on"  # one of SPECULATION
    group: str | None = None
    aliases: tuple[str, ...] = ()  # hashes of the other names that it has for its subject


def parse_body(content_type: str, body: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly; RequestError 415, or 400 for NaN, 1e999, lone surrogates or what is too deep, too.

    A JSON content type is required because a web page can send any other to a loopback address without being asked.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "Content-Type must be application/json")
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 and lone surrogates fail here
    except RecursionError as error:
        raise RequestError(400, "the body is nested too deeply") from error
    except ValueError as error:
        reason = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else str(error)[:200]
        raise RequestError(400, f"the body is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise RequestError(400, f"the body is a JSON {type(value).__name__}, wanted an object")
    _require_shallow(value)
    return value


def as_chat(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is limited, counted and named of a request, in a chat's words where its API has others.

    What its API does not read is left out, or a client could tell one thing to who counts and another to the engine.
    RequestError 400 for what needs a stored response, and for tools that the target would not be shown.
    """
    common = {name: body[name] for name in ("store", "safety_identifier", *UNSUPPORTED) if name in body}
    if path == RESPONSES:
        for name in STORED:
            if body.get(name):
                message = f"{name} is not served, for no response is stored; send all in input"
                raise RequestError(400, message, name, "unsupported")
        for tool in tools if isinstance(tools := body.get("tools"), list) else ():
            if isinstance(tool, Mapping) and tool.get("type") not in TOOLS:
                raise RequestError(400, f"a tool's type must be one of {', '.join(TOOLS)}", "tools", "unsupported")
        items = [_as_message(item) for item in entries] if isinstance(entries := body.get("input"), list) else []
        said = {"max_tokens": body.get("max_output_tokens"), "user": body.get("user"), "stop": body.get("stop")}
        return {**common, **said, "input": items}
    if path.startswith(MESSAGES):
        user = metadata.get("user_id") if isinstance(metadata := body.get("metadata"), Mapping) else None
        kept = {name: body.get(name) for name in ("max_tokens", "messages", "stop_sequences")}
        return {**common, **kept, "user": user}
    return body


def _as_message(item: Any) -> Any:
    """Return an item of a response's input as a message of a chat, which a call of a tool is too."""
    if not isinstance(item, Mapping) or "role" in item:
        return item
    return {"role": "assistant", "tool_calls": [{"function": {"arguments": item.get("arguments")}}]}


def check_limits(body: Mapping[str, Any]) -> None:
    """Refuse with 400 what the engine would ignore, or what would let one request take the whole service."""
    for name, message in UNSUPPORTED.items():
        if body.get(name):
            raise RequestError(400, message, name, "unsupported")
    for name in ("messages", "input"):
        for message in messages if isinstance(messages := body.get(name), list) else ():
            if isinstance(message, Mapping) and message.get("role") not in ROLES:
                raise RequestError(400, f"a message's role must be one of {', '.join(ROLES)}", name)
            _require_shallow_arguments(message, name)
    for name in ("n", "best_of"):
        number = body.get(name)  # a text would be read as a number further in
        if number is not None and not (isinstance(number, int) and 1 <= number <= MAX_CHOICES):
            raise RequestError(400, f"{name} must be an integer from 1 to {MAX_CHOICES}", name)
    prompts = body.get("prompt")
    texts = isinstance(prompts, list) and not any(isinstance(entry, int) for entry in prompts[:1])
    limits = {
        "stop": MAX_STOPS,
        "stop_sequences": MAX_STOPS,
        "bad_words": MAX_BAD_WORDS,
        "prompt": MAX_PROMPTS if texts else None,
    }
    for name, most in limits.items():
        if most is not None and isinstance(entries := body.get(name), list) and len(entries) > most:
            raise RequestError(400, f"{name} has {len(entries)} entries; at most {most} are accepted", name)


def describe_origin(
    request_id: str, headers: Headers, body: Mapping[str, Any], caller: Caller | None, secret: bytes
) -> Origin:
    """Read off a request who asks for what, hashed under the secret; RequestError 400 for what is malformed."""
    try:
        domain = parse_domain(headers.get("x-redraft-domain"))
    except ValueError as error:
        raise RequestError(400, f"X-Redraft-Domain: {error}", "X-Redraft-Domain") from error
    said = headers.getlist("x-redraft-log")  # sent twice it is malformed, not a choice
    consent = consent_level(", ".join(said) if said else None, body.get("store"), caller.log if caller else None)
    sent = caller.key if caller else None
    key = subject_of(sent, None)
    try:
        names = subjects_named(sent, body)
    except ValueError as error:
        raise RequestError(400, str(error), str(error).partition(" ")[0]) from error
    named = headers.getlist("x-redraft-group")  # sent twice it is malformed: no name has a space
    try:
        group = group_of(secret, key, ", ".join(named) if named else None)
    except ValueError as error:
        raise RequestError(400, f"X-Redraft-Group: {error}", "X-Redraft-Group") from error
    subject = names[0] if names else key
    return Origin(request_id, domain, consent, subject, key, _speculation(headers), group, tuple(names[1:]))


def wants_steps(headers: Headers, caller: Caller | None) -> bool:
    """Return whether a request asks for the figures of each step, which tell what a draft was trained on."""
    said = headers.get("x-redraft-detail")
    if said is None:
        return False
    if said != "steps":
        raise RequestError(400, f'X-Redraft-Detail is "{said[:32]}", wanted steps', "X-Redraft-Detail")
    if caller is None or caller.role != "operator":
        raise RequestError(403, "the figures of each step are for operators", "X-Redraft-Detail", "wrong_role")
    return True


def _speculation(headers: Headers) -> str:
    said = headers.get("x-redraft-speculation", SPECULATION[0])
    if said not in SPECULATION:
        message = f'X-Redraft-Speculation is "{said[:32]}", wanted {", ".join(SPECULATION[:-1])} or {SPECULATION[-1]}'
        raise RequestError(400, message, "X-Redraft-Speculation")
    return said


def _require_shallow(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        nested = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [child for children in nested for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise RequestError(400, f"the body is nested more than {MAX_DEPTH} deep")


def _require_shallow_arguments(message: Any, param: str) -> None:
    """Refuse deep JSON in the text of a tool call's arguments, which is parsed for the prompt."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        said = function.get("arguments") if isinstance(function, Mapping) else None
        try:
            _require_shallow({"arguments": json.loads(said) if isinstance(said, str) and said.strip() else None})
        except (ValueError, RecursionError) as error:
            raise RequestError(400, "a tool call's arguments are not JSON, or nested too deeply", param) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Domains:
    """Which domains a key may name: so many since the start, and what it names beyond them is `other`'s.

    Names come from clients, and each is a series of the metrics, a share of every refresh and a regression set.
    One bound for all would let one key's made-up names hide the domains of others.
    """

    def __init__(self) -> None:
        self._named: defaultdict[str | None, set[Domain]] = defaultdict(set)

    def admit(self, key: str | None, domain: Domain) -> Domain:
        """Return the domain that a request counts for; requests without a key are one key's."""
        named = self._named[key]
        if domain not in (DEFAULT_DOMAIN, OTHER_DOMAINS) and domain not in named:
            if len(named) >= MAX_DOMAINS:
                return OTHER_DOMAINS
            named.add(domain)
        return domain
