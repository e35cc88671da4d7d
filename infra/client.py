"""The client of a service: what it says of itself, the switch of speculation, and chats with how each ended.

The library for chats takes most of a second to import, so the first chat pays for it.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import httpx

from infra.home import SERVED_NAME
from infra.status import RunningService, ServiceStatus, parse_status
from models.types import Frozen

TIMEOUT_S, CHAT_TIMEOUT_S, FOLLOW_TIMEOUT_S, POLL_S = 60.0, 120.0, 180.0, 0.1
# A service that refuses at once must not be asked a thousand times a second.
PAUSE_AFTER_FAILURE_S = 0.2

LogLevel = Literal["none", "metadata", "full"]
Speculation = Literal["on", "off", "head"]


class Chat(NamedTuple):
    """A question to the service; `id` comes back with the answer, `fields` are what else the request holds."""

    id: str
    domain: str
    messages: Sequence[Mapping[str, Any]]
    group: str = ""
    fields: Mapping[str, Any] = MappingProxyType({})


class Answer(Frozen):
    """One chat and its end.

    Attributes:
        status: "ok"; "truncated" for a stream that ended without a finish reason; else what failed, such as "http 503".
        gaps: at each token the best one's log-probability minus the second's, if wanted.
        num_steps, num_accepted: verification steps, and drafted tokens that the target kept.
        num_looked_up: those of them that the draft model did not draft.
        drafted_per_step, accepted_per_step: as the service counted them; None where it did not say. vLLM's own endpoint
            leaves out the steps that drafted nothing.
        sent_s: on the machine's monotonic clock; `seconds` is from then to the end of the stream.
        arrival_ms: when each token came, from sending; those of one step come together.
    """

    prompt_id: str
    domain: str
    status: str
    text: str = ""
    finish_reason: str | None = None
    draft_version: str | None = None
    token_ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    num_steps: int = 0
    num_accepted: int = 0
    num_looked_up: int = 0
    drafted_per_step: tuple[int, ...] | None = None
    accepted_per_step: tuple[int, ...] | None = None
    num_tokens: int = 0
    first_token_ms: float | None = None
    arrival_ms: tuple[float, ...] = ()
    sent_s: float
    seconds: float


class Client:
    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S, *, operates: bool = True
    ) -> None:
        """Connect at the first question; with false `operates` the key may do nothing but chat."""
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._detail = {"X-Redraft-Detail": "steps"} if operates else {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> RunningService:
        """Return what the service says of itself; httpx.HTTPError if it says nothing, ValueError as `parse_status`."""
        return parse_status(self._http.get("/redraft/status").raise_for_status().content, self.url)

    def metrics(self) -> str:
        return self._http.get("/metrics").raise_for_status().text

    def speculate(self, on: bool) -> None:
        self._http.post("/redraft/speculation", json={"on": on}).raise_for_status()

    def wait_for_draft(
        self, number: int, holds: Callable[[ServiceStatus, int], bool], timeout_s: float = FOLLOW_TIMEOUT_S
    ) -> None:
        """Wait until the service drafts with a version, as `holds` tells by a status.

        RuntimeError, with the reasons, if it refused the version or did not take it in time.
        """
        until_s = time.monotonic() + timeout_s
        while not holds(status := self.status(), number):
            if time.monotonic() > until_s or any(label.startswith(f"{number}-") for label in status.refused):
                raise RuntimeError(
                    f"the service drafts with {status.draft_version}, not with {number}: {status.untried}"
                )
            time.sleep(POLL_S)

    async def send(
        self,
        chats: Sequence[Chat],
        *,
        concurrency: int,
        max_tokens: int,
        log: LogLevel = "full",
        gaps: bool = False,
        speculation: Speculation = "on",
        on_answer: Callable[[Answer], None] | None = None,
        primers: Sequence[Chat] = (),
    ) -> list[Answer]:
        """Send chats and stream their greedy answers, one a chat, in their order; one that fails says so.

        Before them `primers` are sent, one for each that is in flight, with limits that go up to `max_tokens` in equal
        steps, so that the chats begin one after the other and not at once; RuntimeError if one of them fails. `gaps`
        asks for the two best tokens at each position; speculation "head" measures the draft alone.
        """
        async with self._chats(concurrency) as connection:
            slots = asyncio.Semaphore(concurrency)  # lets in who came first

            async def ask(chat: Chat, most: int) -> Answer:
                async with slots:
                    return await _ask(connection, self._detail, chat, most, log, gaps, speculation)

            async def tell(chat: Chat) -> Answer:
                answer = await ask(chat, max_tokens)
                if on_answer is not None:
                    on_answer(answer)
                return answer

            begun = [
                asyncio.create_task(ask(chat, math.ceil(max_tokens * part / concurrency)))
                for part, chat in zip(range(1, concurrency + 1), itertools.cycle(primers), strict=False)
            ]
            answers = await asyncio.gather(*(tell(chat) for chat in chats))
            failed = [answer.status for answer in await asyncio.gather(*begun) if answer.status != "ok"]
            if failed:
                raise RuntimeError(f"{len(failed)} of {len(begun)} primers failed, the first with {failed[0]}")
            return answers

    async def keep_asking(
        self,
        chats: Sequence[Chat],
        *,
        concurrency: int,
        max_tokens: int,
        stop: Callable[[], bool],
        on_answer: Callable[[Answer], None],
        pause_s: float = 0.0,
    ) -> None:
        """Send greedy chats over and over, with nothing logged, until `stop`, which is asked before each."""
        waiting = itertools.cycle(chats)
        async with self._chats(concurrency) as connection:

            async def ask() -> None:
                while not stop():
                    answer = await _ask(connection, self._detail, next(waiting), max_tokens, "none", gaps=False)
                    on_answer(answer)
                    await asyncio.sleep(pause_s if answer.status == "ok" else max(pause_s, PAUSE_AFTER_FAILURE_S))

            await asyncio.gather(*(ask() for _ in range(concurrency)))

    @asynccontextmanager
    async def _chats(self, concurrency: int) -> AsyncIterator[Any]:
        import openai

        limits = httpx.Limits(max_connections=concurrency)
        http: Any = httpx.AsyncClient(limits=limits, timeout=CHAT_TIMEOUT_S, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=self._api_key or "none",
            max_retries=0,  # a retry would hide a failure
            http_client=http,
        ) as connection:
            yield connection


async def _ask(
    connection: Any,
    detail: Mapping[str, str],
    chat: Chat,
    max_tokens: int,
    log: LogLevel,
    gaps: bool,
    speculation: Speculation = "on",
) -> Answer:
    import openai

    started_s = time.monotonic()
    seen: dict[str, Any] = {"prompt_id": chat.id, "domain": chat.domain, "sent_s": started_s}
    pieces: list[str] = []
    try:
        stream = await connection.chat.completions.create(
            model=SERVED_NAME,
            messages=chat.messages,
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, **chat.fields},
            extra_headers={
                "X-Redraft-Domain": chat.domain,
                "X-Redraft-Log": log,
                "X-Redraft-Speculation": speculation,
                **({"X-Redraft-Group": chat.group} if chat.group else {}),
                **detail,
            },
            **({"logprobs": True, "top_logprobs": 2} if gaps else {}),
        )
        async for chunk in stream:
            _note(seen, pieces, chunk, started_s)
    except openai.APIStatusError as error:
        status = f"http {error.status_code}"
    except (openai.APIConnectionError, httpx.HTTPError) as error:  # the latter if the body broke off
        status = type(error).__name__
    except openai.APIError as error:  # an error frame in the stream
        status = f"error frame: {error.message}"
    else:
        status = "ok" if seen.get("finish_reason") else "truncated"
    return Answer(**seen, text="".join(pieces), status=status, seconds=time.monotonic() - started_s)


def _note(seen: dict[str, Any], pieces: list[str], chunk: Any, started_s: float) -> None:
    for choice in chunk.choices:
        token_ids = (choice.model_extra or {}).get("token_ids") or ()
        if token_ids:  # its text may come later: a token can be part of a letter
            now_ms = 1000 * (time.monotonic() - started_s)
            seen.setdefault("first_token_ms", now_ms)
            seen.setdefault("token_ids", []).extend(token_ids)
            seen.setdefault("arrival_ms", []).extend(now_ms for _ in token_ids)
        for position in choice.logprobs.content or () if choice.logprobs is not None else ():
            best, second = sorted((one.logprob for one in position.top_logprobs), reverse=True)[:2]
            seen.setdefault("gaps", []).append(best - second)
        if choice.delta.content:
            pieces.append(choice.delta.content)
        if choice.finish_reason is not None:
            seen["finish_reason"] = choice.finish_reason
    if chunk.usage is not None:
        seen["num_tokens"] = chunk.usage.completion_tokens
        counts = (chunk.usage.model_extra or {}).get("redraft") or {}
        own = ((chunk.model_extra or {}).get("metrics") or {}).get("speculative_decoding") or {}  # vLLM's
        for what in ("drafted", "accepted"):
            seen[f"{what}_per_step"] = counts.get(f"{what}_per_step", own.get(f"per_step_{what}"))
        seen |= {f"num_{what}": counts.get(what, 0) for what in ("steps", "accepted", "looked_up")}
        seen["draft_version"] = None if counts.get("draft_version") is None else str(counts["draft_version"])
