"""Whose request goes next: the keys in turn, and none with more than its share of the engine at once.

A key that asks for much waits for itself. Of each key's waiting requests the oldest is next; the keys take turns by
deficit round-robin (M. Shreedhar, G. Varghese, "Efficient fair queuing using deficit round robin", SIGCOMM 1995) over
the tokens that their requests may take, so many small requests and a few large ones get the same. No key may run
more than its share of sequences, so that one who comes finds room at once; in the engine, who runs less comes first.
A service without keys has one client, which may take all of it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from models.serving import Limits
from services.access import RequestError

# What a key's turn adds to what it may spend.
QUANTUM_TOKENS = 512
# Of a prompt nothing is known yet but its bytes. English has about four to a token.
BYTES_PER_TOKEN = 4
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
OVERLOADED = RequestError(503, "too many requests are waiting; ask again in a few seconds", code="overloaded")


class Cost(NamedTuple):
    """What a request takes of the engine at most."""

    sequences: int
    tokens: int


class QueuedRequest:
    """A request that runs; `end` lets the next one in, and may be called again."""

    def __init__(self, turns: "FairQueue", key: str | None, cost: Cost, priority: int) -> None:
        """`priority`: how many sequences the key ran before it; the engine takes the lower first."""
        self.priority = priority
        self._turns, self._key, self._cost, self._ended = turns, key, cost, False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._turns.give_back(self._key, self._cost)


class _Waiting(NamedTuple):
    cost: Cost
    turn: "asyncio.Future[QueuedRequest]"


class FairQueue:
    """The requests that run and those that wait; of several keys each runs `per_key` sequences at once."""

    def __init__(
        self, limits: Limits, max_num_seqs: int, max_model_len: int, busy: Callable[[bool], None] = lambda _: None
    ) -> None:
        """`busy` is told when the first request begins to run, and when the last one has ended."""
        self.per_key = max(1, int(limits.max_share_per_key * max_num_seqs))
        self._limits, self._max_num_seqs, self._max_model_len, self._busy = limits, max_num_seqs, max_model_len, busy
        self._running, self._deficits = Counter[str | None](), Counter[str | None]()
        self._waiting: dict[str | None, deque[_Waiting]] = {}
        self._queue: deque[str | None] = deque()  # the keys that wait, the one whose turn it is first

    def cost(self, key: str | None, body: Mapping[str, Any], num_bytes: int) -> Cost:
        """Return what a request may take, of what `as_chat` and `check_limits` left of it and its length in bytes."""
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
        choices = max(_number(body, "n", 1), _number(body, "best_of", 1))
        sequences = choices * (len(prompts or ()) if several else 1)
        if sequences > (most := self._most(key)):
            message = f"n times the number of prompts is {sequences}; at most {most} run at once for a key"
            raise RequestError(400, message, "n" if choices > 1 else "prompt")
        default = self._max_model_len if body.keys() & {"messages", "input"} else COMPLETION_TOKENS
        answer = _number(body, "max_completion_tokens", _number(body, "max_tokens", default))
        return Cost(sequences, num_bytes // BYTES_PER_TOKEN + sequences * min(answer, self._max_model_len))

    async def take(self, key: str | None, cost: Cost) -> QueuedRequest:
        """Wait until a request may run; requests without a key are one key's. RequestError 429 or 503 if many wait."""
        mine = self._waiting.get(key, ()) if key is not None else ()
        waiting, said = sum(one.cost.tokens for one in mine), ""
        if mine and len(mine) >= self._limits.max_queued_requests // 2:
            said = f"{len(mine)} requests of this key"
        if mine and waiting + cost.tokens > self._limits.max_queued_tokens_per_key:
            said = f"requests of this key for {waiting} tokens"
        if said:
            raise RequestError(
                429, f"{said} are waiting; ask again when some were answered", None, "rate_limit_exceeded"
            )
        one = _Waiting(cost, asyncio.get_running_loop().create_future())
        if key not in self._waiting:
            self._waiting[key] = deque()
            self._queue.append(key)
        self._waiting[key].append(one)
        self._let_in()
        if not one.turn.done() and sum(map(len, self._waiting.values())) > self._limits.max_queued_requests:
            self._forget(key, one)
            raise OVERLOADED
        try:
            return await one.turn
        except asyncio.CancelledError:  # the client left
            if one.turn.cancelled():
                self._forget(key, one)
                self._let_in()
            else:
                one.turn.result().end()
            raise

    def give_back(self, key: str | None, cost: Cost) -> None:
        self._running[key] -= cost.sequences
        if not self._running[key]:
            del self._running[key]
        self._let_in()
        if not self._running:
            self._busy(False)

    def _let_in(self) -> None:
        while (room := self._max_num_seqs - self._running.total()) > 0:
            heads = ((key, self._waiting[key][0]) for key in self._queue)  # a key is None where none is asked for
            able = (pair for pair in heads if self._running[pair[0]] + pair[1].cost.sequences <= self._most(pair[0]))
            if (found := next(able, None)) is None:
                return
            key, one = found
            if one.turn.cancelled():  # its client left, and `take` has not heard of it yet
                self._forget(key, one)
                continue
            if one.cost.sequences > room:
                return  # its turn stays; what passed it by could keep it waiting for ever
            if self._deficits[key] < one.cost.tokens:
                self._deficits[key] += QUANTUM_TOKENS
                self._queue.remove(key)
                self._queue.append(key)
                continue
            self._deficits[key] -= one.cost.tokens
            one.turn.set_result(QueuedRequest(self, key, one.cost, self._running[key]))
            if not self._running:
                self._busy(True)
            self._running[key] += one.cost.sequences
            self._forget(key, one)

    def _most(self, key: str | None) -> int:
        return self._max_num_seqs if key is None else self.per_key

    def _forget(self, key: str | None, one: _Waiting) -> None:
        if one not in self._waiting.get(key, ()):
            return
        self._waiting[key].remove(one)
        if not self._waiting[key]:
            del self._waiting[key], self._deficits[key]
            self._queue.remove(key)


def _number(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)  # what is no number is refused further in
    return value if isinstance(value, int) and value > 0 else default
