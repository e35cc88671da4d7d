"""Chats that a small model and the target answer in turn (models/reasoning), for those who ask for it.

What comes out is not the target's own answer, and `usage.redraft` says so. Nothing of such a request is logged,
whatever was agreed to: no draft may learn from it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from models import catalog
from models.chats import ChatEncoder
from models.engines import Engine, EngineParams, Sampling
from models.engines.vllm.tap import EngineEnded
from models.params import BaseParams, did_you_mean
from models.reasoning import Step, Steps, Vocabulary, Writers
from models.serving import Reasoning as Settings
from models.targets import describe, stop_ids
from models.types import Frozen
from services.access import UNAVAILABLE, RequestError
from services.http_server import DONE, event

HEADER = "X-Redraft-Reasoning"
UNFINISHED = "\ufffd"  # stands at the end of a text whose last letter has not come whole
# As vLLM tells of it in a stream; `services.app.from_error` makes of it what a client is told.
ENDED = {"error": {"message": "", "type": "", "param": None, "code": EngineEnded.STATUS.value}}


class Message(Frozen):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Frozen):
    """What such a request may say, as OpenAI's chats do."""

    model: str
    messages: tuple[Message, ...] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**62)
    n: Literal[1] = 1
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    user: str | None = None
    store: bool | None = None


class Reasoned(Frozen):
    """How an answer was written: `usage.redraft` of it."""

    lossless: Literal[False] = False  # it is not what the target would have said
    reasoning: str
    steps: int
    steps_by_small: int
    tokens_by_small: int
    tokens_given_up: int  # by the small model


@dataclass
class Reasoning:
    """Both engines, and the methods that are offered. Made by `start`, ended by `close`."""

    _small: Engine
    _target: Engine
    _vocabulary: Vocabulary
    _tokenizer: Any
    _max_model_len: int
    _served_name: str
    _methods: Mapping[str, BaseParams]
    plain_seeds: bool = True  # whether a seed and a temperature are decoded without drafts
    _names: Iterator[int] = field(default_factory=count)

    @classmethod
    async def start(
        cls, target: Engine, target_dir: Path, max_model_len: int, served_name: str, tokenizer: Any, settings: Settings
    ) -> "Reasoning":
        """Start the small model's engine; ValueError if it can't be loaded, or does not read the target's tokens."""
        directory = Path(settings.model)
        if describe(directory).tokenizer_sha256 != describe(target_dir).tokenizer_sha256:
            raise ValueError(f"[serve.reasoning] model {directory} has another tokenizer than the target")
        params = catalog.parse("engines", settings.engine)
        assert isinstance(params, EngineParams)
        small: Engine = await catalog.load("engines", params.name).start(directory, None, params, "small")
        vocabulary = await asyncio.to_thread(Vocabulary, tokenizer, stop_ids(target_dir))
        length = min(max_model_len, params.max_model_len)
        methods = {method.name: method for method in settings.methods}
        return cls(small, target, vocabulary, tokenizer, length, served_name, methods)

    async def close(self) -> None:
        await self._small.close()

    async def answer(
        self, method: str, body: Mapping[str, Any], request_id: str, priority: int
    ) -> dict[str, Any] | AsyncGenerator[str, None]:
        """Answer a chat, whole or as server-sent events; RequestError for what is not served so."""
        if method not in self._methods:
            raise RequestError(400, f'{HEADER} is "{method[:32]}"{did_you_mean(method[:32], self._methods)}', HEADER)
        asked = _parse(body)
        if asked.model != self._served_name:
            message = f"there is no such model; there is: {self._served_name}"
            raise RequestError(404, message, "model", "model_not_found")
        try:
            turns = [message.model_dump() for message in asked.messages]
            prompt_ids = await asyncio.to_thread(ChatEncoder.of(self._tokenizer).encode, turns)
        except ValueError as error:
            raise RequestError(400, str(error)[:1000], "messages") from error
        room = self._max_model_len - len(prompt_ids)
        wanted = asked.max_completion_tokens or asked.max_tokens or max(1, room)
        if wanted > room:
            message = f"the context length is {self._max_model_len}: {len(prompt_ids)} tokens and {wanted} to come"
            raise RequestError(400, message, "messages", "context_length_exceeded")
        # By the draft alone: what is looked up in recent answers is kept by key, and these engines' calls have none.
        plain = self.plain_seeds and asked.seed is not None and asked.temperature > 0
        drawn = Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            priority=priority,
            drafting="off" if plain else "head",
        )
        name = f"turns-{next(self._names)}"  # of its own: the recorder logs what bears the request's id
        writers = Writers(self._small, self._target, self._vocabulary, self._max_model_len, drawn, name)
        steps = catalog.load("reasoning", method).think(writers, prompt_ids, wanted, self._methods[method])
        told = _Told(method, asked, request_id, len(prompt_ids), self._vocabulary)
        if asked.stream:
            return _streamed(steps, told)
        try:
            async with aclosing(steps):
                async for step in steps:
                    told.add(step)
        except EngineEnded as error:
            raise UNAVAILABLE from error
        return told.whole()


class _Told:
    """What a client is told of an answer as it comes."""

    def __init__(
        self, method: str, asked: ChatRequest, request_id: str, num_prompt_tokens: int, vocabulary: Vocabulary
    ) -> None:
        self._method, self._asked, self._vocabulary = method, asked, vocabulary
        self._num_prompt_tokens, self._sent, self._steps = num_prompt_tokens, 0, list[Step]()
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        named: dict[str, Any] = {"id": f"chatcmpl-{request_id}", "object": kind}
        self._head = named | {"created": int(time.time()), "model": asked.model}

    def add(self, step: Step) -> str:
        """Take a step, and return the text that is new and whole with it."""
        self._steps.append(step)
        text = self._text()
        if text.endswith(UNFINISHED):
            return ""
        sent, self._sent = self._sent, len(text)
        return text[sent:]

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._text()}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish_reason()}
        return {**self._head, "choices": [choice], "usage": self._usage()}

    def chunk(self, delta: dict[str, str], ended: bool = False) -> str:
        """Return an event of the stream; the last one says why it ended."""
        reason = self._finish_reason() if ended else None
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    def rest(self) -> list[str]:
        left = self._text()[self._sent :]
        events = [self.chunk({"content": left})] if left else []
        events.append(self.chunk({}, ended=True))
        if (self._asked.stream_options or {}).get("include_usage"):
            events.append(event({**self._head, "choices": [], "usage": self._usage()}))
        return [*events, DONE]

    def _tokens(self) -> list[int]:
        return [token for step in self._steps for token in step.token_ids]

    def _text(self) -> str:
        return self._vocabulary.text(self._tokens())

    def _finish_reason(self) -> str:
        return "stop" if self._tokens()[-1] in self._vocabulary.answer_ends else "length"

    def _usage(self) -> dict[str, Any]:
        by_small = [step for step in self._steps if step.by == "small"]
        reasoned = Reasoned(
            reasoning=self._method,
            steps=len(self._steps),
            steps_by_small=len(by_small),
            tokens_by_small=sum(len(step.token_ids) for step in by_small),
            tokens_given_up=sum(step.given_up for step in self._steps),
        )
        prompt, completion = self._num_prompt_tokens, len(self._tokens())
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**counts, "redraft": reasoned.model_dump()}


async def _streamed(steps: Steps, told: _Told) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(steps):
            first = True
            async for step in steps:
                if (text := told.add(step)) or first:
                    yield told.chunk({"role": "assistant", "content": text} if first else {"content": text})
                first = False
    except EngineEnded:
        yield event(ENDED)
        yield DONE
    else:
        for last in told.rest():
            yield last


def _parse(body: Mapping[str, Any]) -> ChatRequest:
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        message = f"{where}: {fault['msg']}; with {HEADER} a chat takes {', '.join(ChatRequest.model_fields)}"
        raise RequestError(400, message[:1000], str(fault["loc"][0]), "unsupported") from error
