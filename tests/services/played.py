"""A server that answers as vLLM 0.32 does, frame by frame and as a test wants it, without a model."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from infra.keys import operator_key
from services.recording_middleware import STATUS_PATH

WAIT_S = 60.0
PROMPT_IDS = [71, 72, 73, 74]
METRICS = {"speculative_decoding": {"per_step_drafted": [3, 3], "per_step_accepted": [2, 0]}}


class Step(NamedTuple):
    """What the engine gives at once, as a parser shows it; None is a delta that it holds back."""

    ids: Sequence[int]
    delta: dict[str, Any] | None
    finish: str | None = None
    index: int = 0
    logprobs: Any = None


class Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that was asked, nothing for what is none."""
        try:
            return dict(json.loads(self.raw))
        except ValueError:
            return {}


def frames(body: dict[str, Any], steps: Sequence[Step], fingerprint: str = "", forced: bool = False) -> list[bytes]:
    """Return the events of a stream, as its request asks for them."""
    chat, options = "messages" in body, body.get("stream_options") or {}
    ids, usage = bool(body.get("return_token_ids")), forced or bool(options.get("include_usage"))
    continuous = forced or (usage and bool(options.get("continuous_usage_stats")))
    base = {"id": "chatcmpl-1", "object": "chunk", "created": 1, "model": body["model"]}
    found: list[dict[str, Any]] = []
    for index in range(body.get("n") or 1) if chat else ():
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first = {**base, "choices": [{**choice, "finish_reason": None}]}
        found.append({**first, "prompt_token_ids": PROMPT_IDS if ids else None, "prompt_text": None})
    for number, step in enumerate(steps):
        if chat and step.delta is None and step.finish is None and step.logprobs is None and not ids:
            continue
        delta = step.delta or {}
        choice = {"index": step.index} | ({"delta": delta} if chat else {"text": delta.get("content", "")})
        choice |= {"logprobs": step.logprobs, "finish_reason": step.finish}
        if step.finish or not chat:
            choice["stop_reason"] = None
        if not chat:
            choice["prompt_token_ids"] = PROMPT_IDS if ids and not number else None
        choice["token_ids"] = list(step.ids) if ids else None
        chunk = {**base, "choices": [choice]}
        if continuous:
            chunk["usage"] = {"completion_tokens": number}
        if step.finish and fingerprint and not usage:
            chunk["system_fingerprint"] = fingerprint
        found.append(chunk)
    if usage:
        last = {**base, "choices": [], "usage": {"completion_tokens": 9}, "metrics": METRICS}
        found.append(last | ({"system_fingerprint": fingerprint} if fingerprint else {}))
    lines = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in found]
    return [f"data: {line}\n\n".encode() for line in [*lines, "[DONE]"]]


def whole(body: dict[str, Any], steps: Sequence[Step]) -> bytes:
    """Return an answer that is no stream."""
    ids = [one for step in steps for one in step.ids] if body.get("return_token_ids") else None
    prompt = PROMPT_IDS if ids else None
    text = "".join((step.delta or {}).get("content", "") for step in steps)
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": ids}
    if "messages" in body:
        told = {"choices": [{**choice, "message": {"content": text}}], "prompt_token_ids": prompt}
    else:
        told = {"choices": [{**choice, "text": text, "prompt_token_ids": prompt}]}
    return json.dumps({"id": "1", **told, "usage": {"completion_tokens": 9}, "metrics": METRICS}).encode()


Play = Callable[[Request], AsyncIterator[bytes]]


class PlayedServer:
    """An HTTP/1.1 server, by default on a free port; `play` yields the bytes of each answer, its head included.

    Attributes:
        requests: what came.
        left: set when a client closed the connection before its answer was complete.
        connections: how many were opened.
    """

    def __init__(self, play: Play, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.play, self._tls, self._place = play, tls, (host, port)
        self.requests: list[Request] = []
        self.left, self.connections = asyncio.Event(), 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, *self._place, ssl=self._tls)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"{'https' if self._tls else 'http'}://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while request := await _read(reader):
                self.requests.append(request)
                if not await self._answer(request, reader, writer):
                    break
        except ConnectionError:
            self.left.set()
        finally:
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async def play() -> bool:
            async for part in self.play(request):
                if not part:  # the server dies
                    return False
                writer.write(part)
                await writer.drain()
            return True

        playing, leaving = asyncio.create_task(play()), asyncio.create_task(reader.read(1))
        await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            self.left.set()
            playing.cancel()
            return False
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        return playing.result()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return Request(method, target, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


def head(kind: str = "text/event-stream", status: str = "200 OK", length: int | None = None) -> bytes:
    """Return an answer's head: of a stream, or of so many bytes."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{framing}\r\nX-Server: vllm\r\n\r\n".encode()


def json_answer(content: bytes, status: str = "200 OK") -> bytes:
    """Return an answer of JSON, its head included."""
    return head("application/json", status, len(content)) + content


def chunk(part: bytes) -> bytes:
    """Return bytes as a chunk of HTTP/1.1; the last one is empty."""
    return f"{len(part):x}\r\n".encode() + part + b"\r\n"


def cut_into(text: bytes, piece: int) -> list[bytes]:
    return [text[at : at + piece] for at in range(0, len(text), piece)]


def answering(steps: Sequence[Step], piece: int = 0, **told: Any) -> Play:
    """Play one answer to every request: a stream if it asks for one, in chunks of `piece` bytes or of a frame."""

    async def play(request: Request) -> AsyncIterator[bytes]:
        if request.method == "GET" or not request.body.get("stream"):
            yield json_answer(b'{"data":[]}' if request.method == "GET" else whole(request.body, steps))
        else:
            yield head()
            sent = frames(request.body, steps, **told)
            for part in cut_into(b"".join(sent), piece) if piece else sent:
                yield chunk(part)
            yield chunk(b"")

    return play


# Requests, what the engine gives, how the server plays it, and whether the answer is recorded.
FULL = {"X-Redraft-Log": "full", "X-Redraft-Domain": "code", "Authorization": "Bearer key-of-the-server"}
CHAT = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}
TEXT = {"model": "target", "prompt": "hi", "temperature": 0.5}
STEPS = [Step([80, 81], {"content": "Hé"}), Step([82], {"content": "l"}), Step([83, 84], {"content": "lo"}, "stop")]
HELD_BACK = [
    Step([80], {"reasoning": "so"}),
    Step([81, 82], None),
    Step([83], {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"token_ids":[1]}'}}]}),
    Step([84], {"content": '"token_ids":[7, 8]'}),
    Step([85], None, logprobs={"content": []}),
    Step([86], None, "tool_calls"),
]
CHOICES = [Step([80], {"content": "a"}), Step([81], {"content": "b"}, index=1), Step([82], {"content": "c"}, "stop")]
STREAM = {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}
LAWS: dict[str, tuple[dict[str, Any], list[Step], dict[str, Any], bool]] = {
    "a chat": (CHAT | STREAM, STEPS, {}, True),
    "a fingerprint": (CHAT | STREAM, STEPS, {"fingerprint": "vllm-0.32"}, True),
    "usage in every chunk": (CHAT | STREAM, STEPS, {"forced": True, "fingerprint": "vllm"}, True),
    "tools and thoughts": (CHAT | STREAM | {"tools": []}, HELD_BACK, {}, True),
    "bytes that come in pieces": (CHAT | STREAM, STEPS, {"piece": 7}, True),
    "frames of 64 KiB": (CHAT | STREAM, [Step([80] * 9, {"content": "é" * 40_000}), *STEPS], {"piece": 1460}, True),
    "ids that the client asked for": (CHAT | STREAM | {"return_token_ids": True}, HELD_BACK, {}, True),
    "ids that it did not want": (CHAT | STREAM | {"return_token_ids": False}, HELD_BACK, {}, True),
    "usage that it asked for": (CHAT | STREAM | USAGE, STEPS, {"fingerprint": "vllm"}, True),
    "usage that has no effect": (CHAT | STREAM | {"stream_options": {"continuous_usage_stats": True}}, STEPS, {}, True),
    "all that it asked for": (CHAT | STREAM | USAGE | {"return_token_ids": True}, STEPS, {}, True),
    "two choices": (CHAT | STREAM | {"n": 2}, CHOICES, {}, False),
    "hidden thoughts": (CHAT | STREAM | {"include_reasoning": False}, STEPS, {}, False),
    "a repeated prompt": (TEXT | STREAM | {"echo": True}, STEPS, {}, False),
    "another model": (CHAT | STREAM | {"model": "other"}, STEPS, {}, False),
    "a completion": (TEXT | STREAM, STEPS, {}, True),
    "a whole chat": (CHAT, STEPS, {}, True),
    "a whole completion": (TEXT, STEPS, {}, True),
}
STREAMS = {law: told for law, told in LAWS.items() if "stream" in told[0] and told[3]}


async def status_of(http: httpx.AsyncClient, home: Path, url: str = "") -> dict[str, Any]:
    """Return what a recorder says of itself to the operator of its home."""
    answer = await http.get(url + STATUS_PATH, headers={"Authorization": f"Bearer {operator_key(home)}"})
    return dict(answer.raise_for_status().json())
