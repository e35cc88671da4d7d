"""Clients that keep asking while something breaks, and count how every request ended."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import httpx

from models.core.evaluation.golden import Golden, equal_output, first_difference, near_tie_threshold
from models.types import Frozen
from tests.world import KEY, MODEL, PROMPTS, TLS, Served, ask

MAX_TOKENS = 150
TIMEOUT_S = 120.0
# The target's logits, of 4 to 8, lie 1/32 apart in bfloat16: tokens as near as that are tied or neighbours.
SPACING = 1.1 / 32
# Share of the answers that may be near ties; a single one always may.
MAX_NEAR_TIES = 0.05


class Reply(Frozen):
    """One answer, put together again where it was streamed."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Wanted(Frozen):
    """What the target says to a prompt in a quiet time, and when another answer counts too (`evaluation.golden`)."""

    text: str
    golden: Golden
    threshold: float

    def judge(self, reply: Reply) -> str:
        """Return "ok", "near tie" or "wrong"; an answer that took the other turn at a near tie must be whole too."""
        verdict = equal_output(self.golden, reply.token_ids, self.threshold)
        if verdict == "equal":
            return "ok" if reply.finish_reason and reply.text == self.text else "wrong"
        whole = reply.finish_reason == ("length" if len(reply.token_ids) == MAX_TOKENS else "stop")
        return "near tie" if verdict == "near-tie" and whole else "wrong"

    def compare(self, reply: Reply) -> str:
        """Say how an answer differs."""
        at = first_difference(self.golden.token_ids, reply.token_ids)
        gaps = "" if at is None else f", gaps from there {self.golden.gaps[at : at + 8]}"
        return f"parted at token {at}, threshold {self.threshold:.4g}{gaps}: {reply}, wanted {self.golden.token_ids}"


def quiet_answers(world: Served, prompts: Sequence[str] = PROMPTS, key: str = KEY) -> dict[str, Wanted]:
    """Return what the target says alone to a client, with a threshold of near ties from two more batch sizes.

    The service is left speculating.
    """
    speculation = f"{world.url}/redraft/speculation"
    httpx.post(speculation, json={"on": False}, headers=world.operator, trust_env=False).raise_for_status()
    with world.client(key) as client:

        def answer(prompt: str) -> tuple[str, Golden]:
            options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": 2}
            told = ask(client, prompt, **options, extra_body={"return_token_ids": True}).model_dump()
            [choice], ids = told["choices"], told["prompt_token_ids"]
            best = [sorted(top["logprob"] for top in one["top_logprobs"]) for one in choice["logprobs"]["content"]]
            gaps = tuple(more - less for less, more in best)
            return choice["message"]["content"], Golden(prompt_ids=ids, token_ids=choice["token_ids"], gaps=gaps)

        alone = [answer(prompt) for prompt in prompts]
        golden, reruns = [one for _, one in alone], []
        for batch_size in (3, len(prompts)):
            with ThreadPoolExecutor(batch_size) as pool:
                reruns.append([one for _, one in pool.map(answer, prompts)])
    httpx.post(speculation, json={"on": True}, headers=world.operator, trust_env=False).raise_for_status()
    world.wait_for("speculation", lambda status: bool(status["speculating"]))
    threshold = max(SPACING, near_tie_threshold(golden, reruns))
    answers = zip(prompts, alone, strict=True)
    return {prompt: Wanted(text=text, golden=one, threshold=threshold) for prompt, (text, one) in answers}


class Client(NamedTuple):
    """Who asks: with which key, what, and with which header `X-Redraft-Log`, "" for none."""

    key: str = KEY
    prompts: tuple[str, ...] = tuple(PROMPTS)
    log: str = "full"


class Ended(NamedTuple):
    """A request that ended; times are on the monotonic clock, the id is the service's, "" if it gave none."""

    asker: Client
    prompt: str
    request_id: str
    began_s: float
    ended_s: float
    outcome: str


class Load:
    """Greedy requests from several clients, every other one streamed, each held against the answer of a quiet time.

    Attributes:
        num_clients: how many ask, each one request at a time.
        outcomes: how often a request ended as
            "ok", "near tie" or "wrong", by its text: see `Wanted.judge`;
            "429" or another status: refused in OpenAI's shape; "shapeless": refused, and not in it;
            "error frame": a stream that said that it was broken; "broken": an answer that broke off before its end;
            "cut": a body that ended as a whole one does, and was none;
            "no connection": nobody listened; "no answer": a connection ended before an answer began.
    """

    def __init__(
        self,
        url: str,
        wanted: Mapping[str, Wanted],
        askers: Sequence[Client],
        tell: Callable[[Ended], object] = lambda ended: None,
    ) -> None:
        """Take prompts with their answers (to any other prompt a whole one is "ok"), and who asks, all at once.

        `tell` is called with each request that ended, by several threads.
        """
        self.outcomes: Counter[str] = Counter()
        self._url, self._wanted = f"{url}/v1/chat/completions", wanted
        self._tell = tell
        self._ended, self._begun = threading.Event(), threading.Event()
        self._clients = [threading.Thread(target=self._work, args=one) for one in enumerate(askers)]
        self.num_clients = len(self._clients)

    def __enter__(self) -> Self:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join()

    def ended_well(self, *also: str) -> bool:
        """Whether all requests were answered as wanted, or ended as `also` allows, and few at a near tie."""
        if not self.outcomes["ok"] or not {*self.outcomes} <= {"ok", "near tie", *also}:
            return False
        return self.outcomes["near tie"] <= max(1, MAX_NEAR_TIES * self.outcomes.total())

    def wait_for_stream(self, timeout_s: float = 60.0) -> None:
        """Wait for the first part of the next stream: nearly all of its answer is still to come."""
        self._begun.clear()
        if not self._begun.wait(timeout_s):
            raise TimeoutError(f"no stream began within {timeout_s:g} s")

    def _work(self, number: int, asker: Client) -> None:
        for count in itertools.count(number):
            if self._ended.is_set():
                return
            prompt, began_s = asker.prompts[count // 2 % len(asker.prompts)], time.monotonic()
            request_id, outcome = self._ask(number, asker, prompt, stream=count % 2 == 0)
            self.outcomes[outcome] += 1
            self._tell(Ended(asker, prompt, request_id, began_s, time.monotonic(), outcome))
            if outcome != "ok":
                self._ended.wait(0.2)

    def _ask(self, number: int, asker: Client, prompt: str, stream: bool) -> tuple[str, str]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": stream}
        body |= {"max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {asker.key}"} | ({"X-Redraft-Log": asker.log} if asker.log else {})
        received, request_id, begun = bytearray(), "", False
        try:
            with (
                httpx.Client(timeout=TIMEOUT_S, verify=TLS, trust_env=False) as client,
                client.stream("POST", self._url, json=body, headers=headers) as answer,
            ):
                request_id, begun = answer.headers.get("x-redraft-request", ""), True
                for part in answer.iter_bytes():
                    if stream and not received and answer.is_success:
                        self._begun.set()
                    received += part
        except httpx.ConnectError:
            return request_id, "no connection"
        except httpx.TransportError:
            return request_id, "broken" if begun else "no answer"
        if answer.status_code != httpx.codes.OK:
            return request_id, str(answer.status_code) if _is_error(received) else "shapeless"
        reply = _of_stream(received) if stream else _of_body(received)
        if isinstance(reply, str):
            return request_id, reply
        if prompt not in self._wanted:
            return request_id, "ok" if reply.finish_reason else "cut"
        outcome = self._wanted[prompt].judge(reply)
        if outcome != "ok":
            kind = "a stream" if stream else "a body"
            print(f"{time.time():.3f} client {number}, {kind}: {outcome}, {self._wanted[prompt].compare(reply)}")
        return request_id, outcome


def _of_body(received: bytes) -> Reply:
    [choice] = json.loads(received)["choices"]
    text, ids, finish = choice["message"]["content"], choice["token_ids"], choice["finish_reason"]
    return Reply(text=text, token_ids=ids, finish_reason=finish)


def _of_stream(received: bytes) -> Reply | str:
    lines = received.decode().splitlines()  # an error's has the event's name before it
    frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not frames or frames.pop() != "[DONE]":
        return "cut"
    chunks: list[dict[str, Any]] = [json.loads(frame) for frame in frames]
    if "error" in chunks[-1]:
        return "error frame"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if not choices[-1]["finish_reason"]:
        return "cut"
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    return Reply(text=text, token_ids=ids, finish_reason=choices[-1]["finish_reason"])


def _is_error(received: bytes) -> bool:
    try:
        return json.loads(received)["error"].keys() == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
