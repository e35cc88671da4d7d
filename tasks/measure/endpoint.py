"""A server that is measured: a process of its own, asked over HTTP like any other."""

import asyncio
import threading
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from infra.client import Answer, Client, LogLevel, Speculation
from infra.keys import add_key, keys_path, operator_key, revoke_key
from infra.processes import Child, free_port
from infra.service_process import END_TIMEOUT_S, start_service
from infra.settings import Settings
from infra.status import ServiceStatus
from models.recipe import Recipe
from models.sources import Prompt
from tasks.check_recipe import configure_service
from tasks.select_data import as_chats


class ChatServer(ABC):
    """Answers chats on a port that stays the same when it is started again; a `with` block starts and ends it."""

    def __init__(self, host: str, api_key: str | None, max_tokens: int, grace_s: float = END_TIMEOUT_S) -> None:
        """Take a free port of the host, for what asks for a bearer key if one is given and ends in `grace_s`."""
        self.host, self.port = host, free_port(host)
        self.url = f"http://{host}:{self.port}"
        self._max_tokens, self._grace_s = max_tokens, grace_s
        self._child: Child | None = None
        self.client = self._asker = Client(self.url, api_key)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.client.__exit__()

    @property
    def runs(self) -> bool:
        return self._child is not None

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it answers; RuntimeError if it ends by itself."""

    def stop(self) -> None:
        """End it with all of its processes, if it runs; the service answers running requests first."""
        if self._child is not None:
            self._child.stop(self._grace_s)
            self._child = None

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 1,
        log: LogLevel = "none",
        gaps: bool = False,
        speculation: Speculation = "on",
        on_answer: Callable[[Answer], None] | None = None,
        primers: Sequence[Prompt] = (),
    ) -> list[Answer]:
        """Send prompts; see `Client.send`."""
        return asyncio.run(
            self._asker.send(
                as_chats(prompts),
                concurrency=concurrency,
                max_tokens=self._max_tokens,
                log=log,
                gaps=gaps,
                speculation=speculation,
                on_answer=on_answer,
                primers=as_chats(primers),
            )
        )

    @contextmanager
    def load(self, prompts: Sequence[Prompt], concurrency: int, pause_s: float = 0.0) -> Iterator[list[Answer]]:
        """Let clients in a thread ask while the block runs; yields what has ended so far, in that order."""
        answers: list[Answer] = []
        stop = threading.Event()
        asking = self._asker.keep_asking(
            as_chats(prompts),
            concurrency=concurrency,
            max_tokens=self._max_tokens,
            stop=stop.is_set,
            on_answer=answers.append,
            pause_s=pause_s,
        )
        thread = threading.Thread(target=asyncio.run, args=(asking,), name="load")
        thread.start()
        try:
            yield answers
        finally:
            stop.set()
            thread.join()


class Endpoint(ChatServer):
    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        grace_s = recipe.serve.drain_s + END_TIMEOUT_S
        super().__init__(settings.host, operator_key(settings.home), recipe.generate.max_tokens, grace_s)
        serve = recipe.serve.model_copy(update={"port": self.port})
        self._recipe, self._settings = recipe.model_copy(update={"serve": serve}), settings
        self._key_name = ""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._revoke()

    def start(self) -> None:
        self._child, _ = start_service(configure_service.fn(self._recipe), self._settings)

    def ask_as_another(self) -> None:
        """Ask with a key of its own from now on, for which no earlier answer is looked up."""
        self._revoke()
        self._key_name = f"bench-{uuid.uuid4().hex[:8]}"
        # An operator's, since those are told of each step.
        self._asker = Client(self.url, add_key(keys_path(self._settings), self._key_name, "operator"))

    def speculate_afresh(self, on: bool) -> None:
        """Switch speculation with nothing in the prefix cache, which is emptied when it is switched on."""
        for state in (False, True, on):
            self.client.speculate(state)

    def wait_for_draft(self, number: int) -> None:
        """Wait until the service drafts with a version that has passed its probation; see `Client.wait_for_draft`."""
        self.client.wait_for_draft(number, ServiceStatus.has_proven)

    def _revoke(self) -> None:
        if self._key_name:
            revoke_key(keys_path(self._settings), self._key_name)
            self._key_name = ""


def dump(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return answers as JSON, without their text."""
    return [answer.model_dump(mode="json", exclude={"text"}) for answer in answers]


def require_answers(rows: Sequence[Mapping[str, Any]]) -> None:
    """RuntimeError, by side where answers have one, if a request failed."""
    if failed := Counter(
        ": ".join(filter(None, (row.get("side"), row["status"]))) for row in rows if row["status"] != "ok"
    ):
        raise RuntimeError(f"{failed.total()} of {len(rows)} requests failed: {dict(failed)}")


def forgetful(recipe: Recipe) -> Recipe:
    """Return a recipe whose engine looks up no earlier answers, for a benchmark that asks the same prompts again.

    They would be found there whole, and every speed but a first one would be that of copying.
    """
    if not hasattr(recipe.engine, "lookup"):
        return recipe
    lookup = recipe.engine.lookup.model_copy(update={"remembered": 0})
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"lookup": lookup})})


def undivided(recipe: Recipe) -> Recipe:
    """Return a recipe whose service lets one key have all of the engine's sequences: a benchmark's streams have one."""
    limits = recipe.serve.limits.model_copy(update={"max_share_per_key": 1.0})
    return recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"limits": limits})})
