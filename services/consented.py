"""Which requests to somebody else's server may be recorded, and how they are sent on.

Nothing is learnt from a request whose client did not consent to its text being logged, nor from one whose answer is
none of the target's own over what the prompt says: of several choices or prompts, with pictures, with its prompt
repeated (`echo`, which vLLM writes otherwise once token ids are asked for), or with its thoughts hidden.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from services.access import Keys, RequestError
from services.frames import Added
from services.questions import Domains, Origin, describe_origin, parse_body
from services.recorder import SAMPLING

PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_BODY_BYTES = 32 << 20
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class Unrecorded(Exception):
    """Why a request passes unlogged; "" for one that is no question to a model."""


class Consented(NamedTuple):
    """A request that is recorded: who asked, how, and the body that the server gets."""

    origin: Origin
    sampling: dict[str, Any]
    structured: bool
    added: Added
    body: bytes


def may_record(method: str, path: str, headers: Headers) -> None:
    """Raise Unrecorded for what is not even to be read."""
    if method != "POST" or not path.startswith("/v1/"):
        raise Unrecorded("")
    if path not in PATHS:
        raise Unrecorded("another path")
    if headers.get("x-redraft-log", "full") != "full":
        raise Unrecorded("no consent")


def read_consented(
    headers: Headers, raw: bytes, models: Sequence[str], keys: Keys, secret: bytes, domains: Domains
) -> Consented:
    """Return what is known of a request; Unrecorded if it may not be recorded, or can't be read."""
    caller = keys.caller(headers)
    silent = "x-redraft-log" not in headers and (caller is None or caller.log != "full")
    if silent and b'"store"' not in raw:
        raise Unrecorded("no consent")
    try:
        body = parse_body(headers.get("content-type", ""), raw)
        origin = describe_origin(uuid.uuid4().hex, headers, body, caller, secret)
    except RequestError as error:
        raise Unrecorded("a request that can't be read") from error
    if body.get("model") not in models:
        raise Unrecorded("another model")
    if origin.consent != "full":
        raise Unrecorded("no consent")
    if reason := _unlearnable(body):
        raise Unrecorded(reason)
    origin = origin._replace(domain=domains.admit(origin.key, origin.domain))
    sampling = {name: value for name in SAMPLING if isinstance(value := body.get(name), int | float)}
    if isinstance(most := body.get("max_completion_tokens"), int):
        sampling["max_tokens"] = most
    form = body.get("response_format")
    structured = isinstance(form, dict) and form.get("type", "text") != "text"
    structured |= body.get("tool_choice") not in (None, "none", "auto") or any(map(body.get, GRAMMARS))
    added, sent = _asking(body, raw)
    return Consented(origin, sampling, structured, added, sent)


def _unlearnable(body: Mapping[str, Any]) -> str:
    """Return why the answer says nothing of how the target answers the prompt, "" if it does."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    parts = [
        part
        for message in body.get("messages") or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    reasons = {
        "several choices": any(body.get(name) not in (None, 1) for name in ("n", "best_of"))
        or bool(body.get("use_beam_search")),
        "several prompts": several and len(prompt or ()) != 1,
        "a repeated prompt": bool(body.get("echo")),
        "hidden thoughts": body.get("include_reasoning") is False,
        "other than text": bool(body.get("prompt_embeds"))
        or any(isinstance(part, dict) and part.get("type") not in TEXT_PARTS for part in parts),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _asking(body: dict[str, Any], raw: bytes) -> tuple[Added, bytes]:
    """Return what is asked for beyond the client's wish, and the body that does.

    Where the client names none of it, it is written behind what the client wrote, which stays as it is.
    """
    options = body.get("stream_options")
    streams = body.get("stream") is True and isinstance(options, dict | None)
    wants_usage = bool((options or {}).get("include_usage")) if streams else True
    added = Added(ids=body.get("return_token_ids") is not True, usage=not wants_usage)
    more: dict[str, Any] = {"return_token_ids": True} if added.ids else {}
    if added.usage:  # without it this one has no effect
        kept = {name: value for name, value in (options or {}).items() if name != "continuous_usage_stats"}
        more["stream_options"] = {**kept, "include_usage": True}
    if not more:
        return added, raw
    if more.keys() & body.keys():
        return added, json.dumps({**body, **more}, ensure_ascii=False).encode()
    written = json.dumps(more, separators=(",", ":"))[1:].encode()
    return added, raw.rstrip()[:-1] + b"," + written
