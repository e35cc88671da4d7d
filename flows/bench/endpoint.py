"""A service that is measured: a process of its own, asked over HTTP like any other."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import httpx

from flows.serving import SERVED_NAME, start_service
from flows.traffic import Answer, LogLevel, keep_asking, send
from flows.up import SERVICE_GRACE_S
from infra.processes import Child, free_port
from infra.settings import Settings
from tasks.recipe import Recipe
from tasks.select_data import Prompt

FOLLOW_TIMEOUT_S = 180.0
POLL_S = 0.1


class Endpoint:
    """Started and ended by its `with` block; the port stays the same when it is started again."""

    def __init__(self, recipe: Recipe, settings: Settings, changed: Mapping[str, Any] | None = None) -> None:
        """Say what is to run.

        Args:
            recipe: what is served.
            settings: of the home it is served from.
            changed: keys of the service's configuration that differ from the recipe's.
        """
        self._recipe, self._settings = recipe, settings
        self._changed = {**(changed or {}), "port": free_port(settings.host)}
        self._api_key = settings.api_keys[0] if settings.api_keys else None
        self._child: Child | None = None
        self.url = f"http://{settings.host}:{self._changed['port']}"
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._http.close()

    def start(self) -> None:
        """Start the service and wait until it answers; RuntimeError if it ends by itself."""
        self._child, _ = start_service(self._recipe, self._settings, changed=self._changed)

    def stop(self) -> None:
        """End the service; running requests get their answers first."""
        if self._child is not None:
            self._child.stop(SERVICE_GRACE_S)
            self._child = None

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 1,
        log: LogLevel = "none",
        gaps: bool = False,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Send prompts; see `flows.traffic.send`."""
        return asyncio.run(
            send(
                prompts,
                self.url,
                concurrency=concurrency,
                max_tokens=self._recipe.generate.max_tokens,
                log=log,
                model=SERVED_NAME,
                api_key=self._api_key,
                gaps=gaps,
                on_answer=on_answer,
            )
        )

    def load(self, prompts: Sequence[Prompt], concurrency: int, pause_s: float = 0.0) -> "Load":
        """Return a constant load on this service, for a `with` block."""

        async def ask(stop: Callable[[], bool], on_answer: Callable[[Answer], None]) -> None:
            await keep_asking(
                prompts,
                self.url,
                concurrency=concurrency,
                max_tokens=self._recipe.generate.max_tokens,
                stop=stop,
                on_answer=on_answer,
                pause_s=pause_s,
                model=SERVED_NAME,
                api_key=self._api_key,
            )

        return Load(ask)

    def status(self) -> dict[str, Any]:
        """Return what the service says of itself."""
        answer: dict[str, Any] = self._http.get("/redraft/status").raise_for_status().json()
        return answer

    def speculate(self, on: bool) -> None:
        """Switch speculation."""
        self._http.post("/redraft/speculation", json={"on": on}).raise_for_status()

    def wait_for_draft(self, number: int) -> None:
        """Wait until the service drafts with a version that has passed its probation.

        Raises:
            RuntimeError: it took another one, or none.
        """
        until_s = time.monotonic() + FOLLOW_TIMEOUT_S
        while not proven(status := self.status(), number):
            if time.monotonic() > until_s or status["refused"]:
                raise RuntimeError(
                    f"the service drafts with {status['draft_version']}, not with {number}: "
                    f"{status['refused'] | status['postponed']}"
                )
            time.sleep(POLL_S)


class Load:
    """Clients in a thread of their own that ask from the block's start to its end.

    Attributes:
        answers: what has ended so far, in that order.
    """

    def __init__(self, ask: Callable[[Callable[[], bool], Callable[[Answer], None]], Any]) -> None:
        self.answers: list[Answer] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(ask(self._stop.is_set, self.answers.append)), name="load"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def proven(status: Mapping[str, Any], number: int) -> bool:
    """Whether a service drafts with a version that has passed its probation."""
    return bool(status["speculating"] and status["proof"] and str(status["draft_version"]) == str(number))


def dump(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return answers as JSON, without their text."""
    return [answer.model_dump(mode="json", exclude={"text"}) for answer in answers]
