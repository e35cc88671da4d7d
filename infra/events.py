"""Events for the orchestrator, sent by a thread: nobody waits for them, and the orchestrator may be down.

An event that finds the queue full or nobody listening is dropped and counted.
"""

import base64
import json
import logging
import os
import queue
import threading
import urllib.request
import uuid
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from models.types import Frozen

ACCEPTANCE_FELL, DRAFT_ROLLED_BACK = "redraft.acceptance.fell", "redraft.draft.rolled_back"
APPROVAL_WANTED, ALIAS_PUT_BACK = "redraft.approval.wanted", "redraft.alias.put_back"
PAIR_BROKE, TARGET_DIFFERS = "redraft.pair.broke", "redraft.target.differs"
# What an event is about that is not one domain's.
EVERY_DOMAIN = "all"
RESOURCE, DRAFT_RESOURCE, REGISTRY_RESOURCE = "redraft.domain", "redraft.draft", "redraft.registry"
TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


class EventCounts(Frozen):
    """What became of the events for the orchestrator."""

    sent: int = Field(description="events that the orchestrator took since the start")
    dropped: int = Field(description="events that it did not take")
    last_error: str | None = Field(description="why the last of them was dropped")


class Emitter:
    def __init__(self, api_url: str, capacity: int = 64) -> None:
        """Start the thread; the server's address has /api, and "" drops everything."""
        self.sent = self.dropped = 0
        self.last_error: str | None = None
        self._url = api_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if login := os.environ.get("PREFECT_API_AUTH_STRING"):
            self._headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._drain, name="events", daemon=True)
        self._thread.start()

    def emit(self, event: str, name: str, payload: dict[str, Any], resource: str = RESOURCE) -> bool:
        """Queue an event about a domain, or another resource; False if it was dropped and counted. Never blocks."""
        body = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": {"prefect.resource.id": f"{resource}.{name}", "prefect.resource.name": name},
            "payload": payload,
        }
        if not self._url:
            return self._drop("there is no orchestrator")
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            return self._drop("the queue is full")
        return True

    def counts(self) -> EventCounts:
        return EventCounts(sent=self.sent, dropped=self.dropped, last_error=self.last_error)

    def close(self, timeout_s: float = 5.0) -> None:
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("events did not end in %g s", timeout_s)
        self._thread.join(timeout_s)

    def _drain(self) -> None:
        while (body := self._queue.get()) is not None:
            request = urllib.request.Request(
                f"{self._url}/events", data=json.dumps([body], allow_nan=False).encode(), headers=self._headers
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    self.sent += 1
            except OSError as error:  # refused, timed out, or an HTTP error status
                self._drop(str(error))

    def _drop(self, reason: str) -> bool:
        self.dropped += 1
        self.last_error = reason
        log.warning("an event was dropped: %s", reason)
        return False
