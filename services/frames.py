"""What an OpenAI-compatible server answers, as it passes: it is read, and what only we asked for is taken out.

A request is sent on with `return_token_ids` and `stream_options.include_usage`. vLLM then fills fields that are null
otherwise, sends a chunk of its own for tokens that a parser held back, and a last one with the usage, on which the
fingerprint stands that the last choice has without it. All that is undone in the bytes, so that the rest is what the
server wrote; what can't be read passes as it came. A stream is held up by one frame at most, the last choice's.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from models.engines import Completion
from models.engines.vllm.redraft_vllm.served import COMMENT, ServedBy, read_told

# A key of JSON has no backslash before its last quote, so that no text of an answer looks like one.
KEYS = (b'"token_ids":', b'"token_ids": ', b'"prompt_token_ids":', b'"prompt_token_ids": ')
IDS = re.compile(rb"\[(?:%s)[\d,\s]*\]" % b"|".join(rb"(?<=%s\[)" % key for key in KEYS))
BEGIN, ENDING = b'"token_ids":[', b"\n\n"
END = re.compile(rb"\n\r?\n")
MAX_FRAME_BYTES = 64 << 20
UNREADABLE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)


class Added(NamedTuple):
    """What a request is sent on with that its client did not ask for."""

    ids: bool
    usage: bool


class AnswerReader:
    """Reads one answer of one choice; `fault` is why nothing can be learnt from it, "" if nothing speaks against it."""

    def __init__(self, added: Added) -> None:
        self.fault, self._added = "", added
        self._began_s = self._first_s = self._last_s = time.monotonic()
        self.served_by = ServedBy()
        self._prompt_ids, self._token_ids = list[int](), list[int]()
        self._unread = list[bytes]()  # token ids behind those
        self._told: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._forced_usage = False

    def whole(self, body: bytes) -> bytes:
        """Read an answer that is no stream; return what the client gets of it."""
        try:
            self._read(msgspec.json.decode(body))
        except UNREADABLE:
            self.fault = "an answer that can't be read"
            return body
        return without_ids(body) if self._added.ids else body

    def completion(self, request_id: str, structured: bool) -> Completion:
        """Return what was answered so far; ValueError if its counts don't fit."""
        self._read_ids()
        drafted = tuple(self._told.get("per_step_drafted") or ())
        return Completion(
            request_id=request_id,
            prompt_ids=tuple(self._prompt_ids),
            token_ids=tuple(self._token_ids),
            drafted=drafted,
            accepted=tuple(self._told.get("per_step_accepted") or ()),
            drafted_ids=(),
            finish_reason="stop" if self._finish_reason == "tool_calls" else self._finish_reason,
            first_token_ms=1000 * (self._first_s - self._began_s),
            per_token_ms=1000 * (self._last_s - self._first_s) / max(1, len(self._token_ids) - 1),
            draft_version=self.served_by.draft_version,
            speculating=bool(drafted),
            server=self.served_by.server,
            structured=structured,
        )

    @property
    def has_ids(self) -> bool:
        return bool(self._prompt_ids and (self._token_ids or self._unread))

    def _read(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.fault = "an error"
            return
        self._told = (body.get("metrics") or {}).get("speculative_decoding") or self._told
        self._prompt_ids = body.get("prompt_token_ids") or self._prompt_ids
        for choice in body["choices"]:
            self._prompt_ids = choice.get("prompt_token_ids") or self._prompt_ids
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if new := choice.get("token_ids"):
                self._read_ids()
                self._last_s = time.monotonic()
                if not self._token_ids:
                    self._first_s = self._last_s
                self._token_ids += new

    def _read_ids(self) -> None:
        if self._unread:
            self._token_ids += msgspec.json.decode(b"[" + b",".join(self._unread) + b"]", type=list[int])
            self._unread.clear()


class StreamReader(AnswerReader):
    """Reads a stream of server-sent events of one choice."""

    def __init__(self, added: Added) -> None:
        super().__init__(added)
        self._rest, self._searched, self._held = bytearray(), 0, b""

    def feed(self, part: bytes) -> bytes:
        """Take what came; return what of it may go on to the client now."""
        if not self._rest and 0 < part.find(ENDING) == len(part) - len(ENDING) and b"\r" not in part:
            return self._passed(part)
        self._rest += part
        out, begin, at = [], 0, self._searched
        while found := END.search(self._rest, at):
            at = found.end()
            out.append(self._passed(bytes(self._rest[begin:at])))
            begin = at
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 2)
        if len(self._rest) > MAX_FRAME_BYTES:
            self.fault = "a frame that does not end"
            out.append(self.rest())
        return b"".join(out)

    def rest(self) -> bytes:
        """Return what has not gone on yet: nothing more comes, or nothing that could be read."""
        rest = self._held + bytes(self._rest)
        self._rest, self._searched, self._held = bytearray(), 0, b""
        return rest

    def _passed(self, frame: bytes) -> bytes:
        held, self._held = self._held, b""
        if self._added.ids and (usual := self._without_ids(frame)):
            return held + usual
        told = frame.strip()
        if frame.startswith(COMMENT):
            self.served_by = read_told(told[len(COMMENT) :])
            return held
        if not told.startswith(b"data:") or (told := told[len(b"data:") :].strip()) == b"[DONE]":
            return held + frame
        try:
            body = msgspec.json.decode(told)
            self._read(body)
            if not (choices := body.get("choices") or []):
                ours = self._added.usage and not self._forced_usage and isinstance(body.get("usage"), dict)
                return _stamped(held, body.get("system_fingerprint")) if ours else held + frame
            self._forced_usage |= self._added.usage and body.get("usage") is not None
            if self._added.ids:
                if all(map(_is_held_back, choices)):
                    return held
                frame = without_ids(frame)
            if self._added.usage and not self._forced_usage and any(one.get("finish_reason") for one in choices):
                self._held, frame = frame, b""
        except UNREADABLE:
            self.fault = "a frame that can't be read"
        return held + frame

    def _without_ids(self, frame: bytes) -> bytes:
        """Return a frame of which only the token ids are to be read, without them; b"" for every other one.

        Most are such, and a frame finds the processor's caches cold: neither parser nor regular expression is run.
        """
        begin = frame.find(BEGIN) + len(BEGIN)
        end = frame.find(b"]", begin)
        ids = frame[begin:end]
        if (
            begin < len(BEGIN)
            or not ids.translate(None, b",").isdigit()
            or not frame.startswith(b"data: {")
            or b'"finish_reason":null' not in frame
            or b'"delta":{}' in frame
            or b'"usage"' in frame
            or b'"metrics"' in frame
            or b'"prompt_token_ids":[' in frame
        ):
            return b""
        self._last_s = time.monotonic()
        if not self._unread and not self._token_ids:
            self._first_s = self._last_s
        self._unread.append(ids)
        return frame[: begin - 1] + b"null" + frame[end + 1 :]


def without_ids(answer: bytes) -> bytes:
    """Return JSON with null for its token ids, as where they were not asked for."""
    return IDS.sub(b"null", answer)


def _is_held_back(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has nothing but token ids: a parser holds their text back, or takes it for its own."""
    return (
        choice.get("delta") == {}
        and isinstance(choice.get("token_ids"), list)
        and choice.get("finish_reason") is None
        and choice.get("logprobs") is None
    )


def _stamped(frame: bytes, fingerprint: object) -> bytes:
    """Return the last choice's frame with the fingerprint that it has where no usage comes after it."""
    if not frame or not isinstance(fingerprint, str):
        return frame
    at = frame.rindex(b"}")
    return frame[:at] + b',"system_fingerprint":' + json.dumps(fingerprint).encode() + frame[at:]
