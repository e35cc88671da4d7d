"""Traffic for a running service: prompts in, what became of each request out. A client like any other, over HTTP."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import openai
from pydantic import BaseModel, ConfigDict

from tasks.select_data import Prompt

TIMEOUT_S = 120.0
# A service that refuses at once must not be asked a thousand times a second.
PAUSE_AFTER_FAILURE_S = 0.2

LogLevel = Literal["none", "metadata", "full"]


class Answer(BaseModel):
    """One request and its end.

    Attributes:
        status: "ok"; "truncated" for a stream that ended without a finish reason; else what failed, such as "http 503".
        token_ids: of the answer, and `gaps` at each: the best token's log-probability minus the second's, if wanted.
        drafted_per_step, accepted_per_step: as the service counted them; None where it did not say.
        sent_s: when it was sent, on the machine's monotonic clock.
        arrival_ms: when each token came, from sending; those of one step come together.
        seconds: from sending to the end of the stream.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_id: str
    domain: str
    status: str
    text: str = ""
    finish_reason: str | None = None
    draft_version: str | None = None
    token_ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    drafted_per_step: tuple[int, ...] | None = None
    accepted_per_step: tuple[int, ...] | None = None
    num_tokens: int = 0
    first_token_ms: float | None = None
    arrival_ms: tuple[float, ...] = ()
    sent_s: float
    seconds: float


class TrafficReport(BaseModel):
    """A set of requests.

    Attributes:
        num_ok: requests that were answered to the end.
        failures: status to number of the others.
        tau: 1 + accepted / steps over all requests, None if nothing was verified.
        tokens_per_s: of all requests together.
        draft_versions: version to the number of requests that it drafted for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    tau: float | None
    tokens_per_s: float
    seconds: float
    draft_versions: dict[str, int]


async def send(
    prompts: Sequence[Prompt],
    url: str,
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
    log: LogLevel = "full",
    model: str = "target",
    api_key: str | None = None,
    gaps: bool = False,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Send prompts as streamed chats.

    Args:
        prompts: what to send; each carries its domain.
        url: of the service, without /v1.
        concurrency: requests in flight.
        max_tokens: of each answer.
        temperature: 0 is greedy.
        log: what the service may log.
        model: the served name.
        api_key: bearer key, if the service asks for one.
        gaps: whether to ask for the two best tokens at each position.
        on_answer: called with each answer as it ends.

    Returns:
        One answer a prompt, in their order; a request that fails is an answer that says so.
    """
    async with _client(url, api_key, concurrency) as client:
        slots = asyncio.Semaphore(concurrency)

        async def ask(prompt: Prompt) -> Answer:
            async with slots:
                answer = await _ask(client, prompt, model, max_tokens, temperature, log, gaps)
            if on_answer is not None:
                on_answer(answer)
            return answer

        return await asyncio.gather(*(ask(prompt) for prompt in prompts))


async def keep_asking(
    prompts: Sequence[Prompt],
    url: str,
    *,
    concurrency: int,
    max_tokens: int,
    stop: Callable[[], bool],
    on_answer: Callable[[Answer], None],
    pause_s: float = 0.0,
    model: str = "target",
    api_key: str | None = None,
) -> None:
    """Send prompts over and over, as clients that ask again when they were answered; greedy, nothing is logged.

    Args:
        prompts: what to send, in turn.
        url: of the service, without /v1.
        concurrency: number of clients.
        max_tokens: of each answer.
        stop: asked before each request; running ones are waited for.
        on_answer: called with each answer as it ends.
        pause_s: what a client waits between an answer and its next request.
        model: the served name.
        api_key: bearer key, if the service asks for one.
    """
    waiting = itertools.cycle(prompts)
    async with _client(url, api_key, concurrency) as client:

        async def ask() -> None:
            while not stop():
                answer = await _ask(client, next(waiting), model, max_tokens, 0.0, "none", gaps=False)
                on_answer(answer)
                await asyncio.sleep(pause_s if answer.status == "ok" else max(pause_s, PAUSE_AFTER_FAILURE_S))

        await asyncio.gather(*(ask() for _ in range(concurrency)))


def summarise(answers: Sequence[Answer], seconds: float) -> TrafficReport:
    """Sum answers up.

    Args:
        answers: any number.
        seconds: how long they took together.
    """
    ok = [answer for answer in answers if answer.status == "ok"]
    steps = sum(len(answer.accepted_per_step or ()) for answer in ok)
    accepted = sum(sum(answer.accepted_per_step or ()) for answer in ok)
    return TrafficReport(
        num_requests=len(answers),
        num_ok=len(ok),
        failures=dict(Counter(answer.status for answer in answers if answer.status != "ok")),
        tau=1 + accepted / steps if steps else None,
        tokens_per_s=sum(answer.num_tokens for answer in ok) / max(seconds, 1e-9),
        seconds=seconds,
        draft_versions=dict(Counter(answer.draft_version for answer in ok if answer.draft_version is not None)),
    )


@asynccontextmanager
async def _client(url: str, api_key: str | None, concurrency: int) -> AsyncIterator[openai.AsyncOpenAI]:
    limits = httpx.Limits(max_connections=concurrency)
    async with openai.AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key=api_key or "none",
        max_retries=0,  # a retry would hide a failure
        http_client=httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False),
    ) as client:
        yield client


async def _ask(
    client: openai.AsyncOpenAI, prompt: Prompt, model: str, max_tokens: int, temperature: float, log: str, gaps: bool
) -> Answer:
    started_s = time.monotonic()
    seen: dict[str, Any] = {"prompt_id": prompt.id, "domain": prompt.domain, "sent_s": started_s}
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[message.model_dump() for message in prompt.messages],
            max_tokens=max_tokens,
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
            **({"logprobs": True, "top_logprobs": 2} if gaps else {}),
            extra_headers={"X-Redraft-Domain": prompt.domain, "X-Redraft-Log": log},
        )
        async for chunk in stream:
            _note(seen, chunk, started_s)
    except openai.APIStatusError as error:
        status = f"http {error.status_code}"
    except openai.APIConnectionError as error:
        status = type(error).__name__
    except openai.APIError as error:  # an error frame in the stream
        status = f"error frame: {error.message}"
    except httpx.HTTPError as error:  # the body broke off
        status = type(error).__name__
    else:
        status = "ok" if seen.get("finish_reason") else "truncated"
    return Answer(**seen, status=status, seconds=time.monotonic() - started_s)


def _note(seen: dict[str, Any], chunk: Any, started_s: float) -> None:
    for choice in chunk.choices:
        token_ids = (choice.model_extra or {}).get("token_ids") or ()
        if token_ids:  # its text may come later: a token can be part of a letter
            now_ms = 1000 * (time.monotonic() - started_s)
            seen.setdefault("first_token_ms", now_ms)
            seen["token_ids"] = (*seen.get("token_ids", ()), *token_ids)
            seen["arrival_ms"] = (*seen.get("arrival_ms", ()), *(now_ms for _ in token_ids))
        for position in choice.logprobs.content or () if choice.logprobs is not None else ():
            best, second = sorted((one.logprob for one in position.top_logprobs), reverse=True)[:2]
            seen["gaps"] = (*seen.get("gaps", ()), best - second)
        if choice.delta.content:
            seen["text"] = seen.get("text", "") + choice.delta.content
        if choice.finish_reason is not None:
            seen["finish_reason"] = choice.finish_reason
    if chunk.usage is not None:
        seen["num_tokens"] = chunk.usage.completion_tokens
        counts = (chunk.usage.model_extra or {}).get("redraft") or {}
        seen |= {name: counts.get(name) for name in ("drafted_per_step", "accepted_per_step")}
        seen["draft_version"] = None if counts.get("draft_version") is None else str(counts["draft_version"])
