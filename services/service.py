"""One engine with everything around it: handlers, recorder, reconciler. Runs in one event loop, with or without Ray."""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from typing import Any

from infra.events import ACCEPTANCE_FELL, Emitter
from infra.logwriter import BackgroundWriter
from infra.querylog import QueryLog
from infra.registry import Registry
from models import catalog
from models.engines.vllm import VllmEngine
from models.golden import load_golden
from models.targets import describe
from models.watch import AcceptanceWatch
from services.access import Admission
from services.config import ServiceConfig
from services.drafts import DraftSource, Loaded, State, choose_boot_draft, read_state, write_state
from services.handlers import Handlers
from services.reconciler import Reconciler
from services.recorder import Recorder

log = logging.getLogger(__name__)


class Service:
    """Made by `start`, ended by `close`."""

    def __init__(
        self, config: ServiceConfig, engine: VllmEngine, handlers: Handlers, reconciler: Reconciler | None
    ) -> None:
        self.config, self.engine, self.handlers, self.reconciler = config, engine, handlers, reconciler
        self.admission = Admission(config.api_keys)
        writer = BackgroundWriter(QueryLog(config.querylog))
        self.recorder = Recorder(writer, handlers.tokenizer, config.target_version)
        engine.on_finish = self.recorder.finished
        self._started_s = time.monotonic()
        self._events = Emitter(config.orchestrator)
        self._tasks = [asyncio.create_task(self._watch(), name="watch")]
        if reconciler is not None:
            self._tasks.append(asyncio.create_task(reconciler.run(), name="reconciler"))

    @classmethod
    async def start(cls, config: ServiceConfig) -> "Service":
        """Load the target and, if there is one, the draft that the registry or the cache has for it.

        Raises:
            ValueError: the configuration or the target's files are wrong.
            RuntimeError: the engine does not start, even without a draft.
        """
        counts: Counter[str] = Counter()
        if config.draft is None:
            engine = await VllmEngine.start(config.target_dir, None, config.engine_params(), config.served_name)
            follow = None
        else:
            target = await asyncio.to_thread(describe, config.target_dir)
            goldens, threshold = load_golden(config.target_dir)
            check = catalog.load("drafts", config.draft).check
            source = DraftSource(Registry(config.registry_uri, config.artifact_root), config.cache, target, check)
            engine, boot, state = await _start_engine(config, source, counts)
            follow = Reconciler(engine, source, goldens, threshold, config, boot, state, counts)
        try:
            return cls(config, engine, await Handlers.build(engine, config.tool_parser), follow)
        except BaseException:
            await engine.close()
            raise

    async def set_speculation(self, on: bool) -> bool:
        """Switch speculation for an operator; returns whether the engine speculates."""
        if self.reconciler is None:
            return False
        return await self.reconciler.set_speculation(on)

    async def health(self) -> None:
        """Raise RuntimeError if the target can't serve; drafts, registry and log don't matter here."""
        await self.engine.health()

    def require_no_replacement(self) -> None:
        """Raise RuntimeError if only a new replica can serve what the registry wants."""
        if self.reconciler is not None and self.reconciler.replacement is not None:
            raise RuntimeError(self.reconciler.replacement)

    def status(self) -> dict[str, Any]:
        """Return what /redraft/status shows."""
        reconciler = self.reconciler
        serving = reconciler.serving if reconciler else None
        proof = reconciler.proof if reconciler else None
        postponed = reconciler.postponed if reconciler else {}
        return {
            "champion": reconciler.champion if reconciler else None,
            "draft_version": serving.version.number if serving else None,
            "speculating": self.engine.speculating,
            "fallback": reconciler.fallback if reconciler else "drafts are not followed",
            "replacement": reconciler.replacement if reconciler else None,
            "swaps": reconciler.counts["swaps"] if reconciler else 0,
            "swap_ms": reconciler.swap_ms if reconciler else None,
            "proof": proof.model_dump() if proof else None,
            "refused": dict(reconciler.refused) if reconciler else {},
            "postponed": {name: one.describe() for name, one in postponed.items()},
            "reconciler": dict(reconciler.counts) if reconciler else {},
            "acceptance": self.recorder.acceptance(),
            "log": self.recorder.counts(),
            "events": {
                "sent": self._events.sent,
                "dropped": self._events.dropped,
                "last_error": self._events.last_error,
            },
            "tokens": self.recorder.tokens,
            "requests": {str(status): number for status, number in sorted(self.admission.responses.items())},
            "in_flight": self.admission.in_flight,
            "target_version": self.config.target_version,
            "served_name": self.config.served_name,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
        }

    async def drain(self) -> int:
        """Refuse new requests, wait for the running ones, and return how many were left at the end of the time."""
        self.admission.draining = True
        deadline_s = time.monotonic() + self.config.drain_s
        while self.admission.in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return self.admission.in_flight

    async def close(self) -> None:
        """End the loop, write what was recorded, end the engine's processes."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(self.recorder.close)
        await asyncio.to_thread(self._events.close)
        await self.engine.close()

    async def _watch(self) -> None:
        """Tell the orchestrator when a domain's acceptance fell short of what its draft was promoted for."""
        watch = AcceptanceWatch(self.config.watch)
        while True:
            await asyncio.sleep(self.config.watch.period_s)
            serving = self.reconciler.serving if self.reconciler is not None else None
            if serving is None:
                continue
            promised = json.loads(serving.version.tags.get("tau") or "{}")
            fallen = watch.see(str(serving.version.number), promised, self.recorder.acceptance(), time.monotonic())
            for domain, figures in fallen.items():
                self._events.emit(ACCEPTANCE_FELL, domain, {"draft": serving.version.number, **figures})


async def _start_engine(
    config: ServiceConfig, source: DraftSource, counts: Counter[str]
) -> tuple[VllmEngine, Loaded | None, State]:
    """Start with the best draft there is; one that the engine can't start with is refused, and the next one tried."""
    params = config.engine_params()
    try:
        state = read_state(config.state)
    except ValueError as error:
        counts["errors"] += 1
        log.warning("%s; starting without it", error)
        state = State()
    while True:
        boot, state = await asyncio.to_thread(choose_boot_draft, source, state, counts)
        if boot is None:
            return await VllmEngine.start(config.target_dir, None, params, config.served_name), None, state
        version = str(boot.version.number)
        try:
            engine = await VllmEngine.start(config.target_dir, boot.directory, params, config.served_name, version)
            return engine, boot, state
        except (ValueError, RuntimeError) as error:
            counts["errors"] += 1
            log.exception("the engine did not start with draft %s", version)
            state = state.with_refused(boot.version, f"the engine did not start with it: {type(error).__name__}")
            await asyncio.to_thread(write_state, config.state, state)
