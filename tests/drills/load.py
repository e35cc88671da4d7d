"""Clients that keep asking while something breaks, and count how every request ended."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import httpx

from tests.world import KEY, MODEL, PROMPTS, World, stream_text

MAX_TOKENS = 150
TIMEOUT_S = 120.0


def quiet_answers(world: World) -> dict[str, str]:
    """Return the answers of a service that nothing happens to."""
    with world.client() as client:
        return {prompt: stream_text(client, prompt, max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS}


class Load:
    """Greedy requests from several clients, every other one streamed, each held against the answer of a quiet time.

    Attributes:
        outcomes: how often a request ended as
            "ok": with a finish reason and the wanted text;
            "error frame": a stream that said that it was broken;
            "429", "503": refused in OpenAI's shape; any other status likewise;
            "cut": a body that ended without either;
            "wrong": another text;
            "shapeless": an error that is not in OpenAI's shape;
            "no connection": nobody listened.
        streaming: the clients that have the first part of a stream and not its last one.
    """

    def __init__(self, url: str, wanted: Mapping[str, str], num_clients: int) -> None:
        """Make it; `with` runs it.

        Args:
            url: of the service.
            wanted: prompt to answer, see `quiet_answers`.
            num_clients: how many ask at once.
        """
        self.outcomes: Counter[str] = Counter()
        self.streaming: set[int] = set()
        self._url, self._wanted = f"{url}/v1/chat/completions", wanted
        self._ended = threading.Event()
        self._clients = [threading.Thread(target=self._work, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Self:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join()

    def _work(self, number: int) -> None:
        for count in itertools.count(number):
            if self._ended.is_set():
                return
            prompt = PROMPTS[count // 2 % len(PROMPTS)]
            outcome = self._ask(number, prompt, stream=count % 2 == 0)
            self.streaming.discard(number)
            self.outcomes[outcome] += 1
            if outcome != "ok":
                self._ended.wait(0.2)

    def _ask(self, number: int, prompt: str, stream: bool) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": stream}
        body |= {"max_tokens": MAX_TOKENS, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEY}", "X-Redraft-Log": "full"}
        received = bytearray()
        try:
            with (
                httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
                client.stream("POST", self._url, json=body, headers=headers) as answer,
            ):
                for part in answer.iter_bytes():
                    received += part
                    if stream and b"[DONE]" not in part:
                        self.streaming.add(number)
                    else:
                        self.streaming.discard(number)
        except httpx.ConnectError:
            return "no connection"
        except httpx.TransportError:
            return "cut"
        if answer.status_code != httpx.codes.OK:
            return str(answer.status_code) if _is_error(received) else "shapeless"
        return self._judge_stream(prompt, received) if stream else self._judge_whole(prompt, received)

    def _judge_whole(self, prompt: str, received: bytes) -> str:
        [choice] = json.loads(received)["choices"]
        return "ok" if choice["finish_reason"] and choice["message"]["content"] == self._wanted[prompt] else "wrong"

    def _judge_stream(self, prompt: str, received: bytes) -> str:
        frames = [frame.removeprefix("data: ") for frame in received.decode().split("\n\n") if frame]
        if not frames or frames.pop() != "[DONE]":
            return "cut"
        chunks: list[dict[str, Any]] = [json.loads(frame) for frame in frames]
        if "error" in chunks[-1]:
            return "error frame"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        if not choices[-1]["finish_reason"]:
            return "cut"
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return "ok" if text == self._wanted[prompt] else "wrong"


def _is_error(received: bytes) -> bool:
    try:
        return json.loads(received)["error"].keys() == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
