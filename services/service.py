"""One engine with everything around it: handlers, recorder, reconciler. Runs in one event loop, with or without Ray."""

import asyncio
import logging
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from infra.artifacts import hold
from infra.events import EVERY_DOMAIN, Emitter
from infra.home import SERVED_NAME, home_secret
from infra.keys import is_loopback
from infra.priority import Busy, cores, gpus
from infra.querylog import BackgroundWriter, CapturedFiles, QueryLog
from infra.registry import open_registry
from infra.rollout_store import Member, RolloutStore
from infra.status import ServiceStatus, of_domains
from models.chats import ChatEncoder
from models.core.drafting.draft_families import read_vocabulary
from models.core.evaluation.golden import load_golden
from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.engines.vllm.measuring import measure
from models.engines.vllm.openai import Handlers
from models.engines.vllm.tap import is_seeded, tells_of_draft
from models.targets import describe
from services.access import Admission, Keys
from services.capture import Capture
from services.config import ServiceConfig
from services.drafts import DraftHistory, DraftSource, DraftState, Loaded, start_engine
from services.drift import AcceptanceSampler, DriftWatch, counts_of
from services.failures import BackgroundTasks
from services.fair_queue import FairQueue
from services.questions import Domains
from services.reasoning import Reasoning
from services.reconciler import Reconciler, ReplicaHooks
from services.recorder import Recorder

UNFOLLOWED = replace(DraftState.started(None, DraftHistory()), fallback="drafts are not followed")
UNDRAFTED = replace(UNFOLLOWED, fallback="num_draft_tokens is 0, so no draft is served")

# How soon a running service forgets what was erased.
ERASURES_S = 2.0

log = logging.getLogger(__name__)


class Service:
    """Made by `start`, ended by `close`."""

    def __init__(
        self,
        config: ServiceConfig,
        engine: VllmEngine,
        handlers: Handlers,
        recorder: Recorder,
        events: Emitter,
        reconciler: Reconciler | None,
        capture: Capture | None,
        reasoning: Reasoning | None,
        member: Member | None,
    ) -> None:
        self.member, self._joined = member, ExitStack()
        self.config, self.engine, self.handlers, self.reconciler = config, engine, handlers, reconciler
        self.recorder, self.reasoning, self._events, self._capture = recorder, reasoning, events, capture
        self.admission = Admission(Keys(config.keys, is_loopback(config.settings.host)))
        self.secret, self.domains, self.background = home_secret(config.settings.home), Domains(), BackgroundTasks()
        params, busy = config.engine_params(), Busy(config.settings.home)
        busy.occupy(cores() | (set() if config.settings.device == "cpu" else gpus(0, params.num_devices)))
        self.turns = FairQueue(config.serve.limits, params.max_num_seqs, params.max_model_len, busy.tell)
        engine.llm.merge_streams = config.serve.merge_streams
        engine.llm.on_finish, engine.llm.options_of = self.recorder.finished, self._options_of
        self._alone = AcceptanceSampler()
        self._drift = DriftWatch(config.serve.drift_detector, config.settings.querylog, events)
        self._num_seeded, self._started_s = 0, time.monotonic()
        self._plain_seeds = plain_seeds(config, engine)

    @classmethod
    async def start(cls, config: ServiceConfig, replica: str = "") -> "Service":
        """Load the target and, if there is one, the draft that the registry or the cache has for it.

        `replica` is the name of one of several, which follow the registry together.
        """
        counts, member, own = Counter[str](), None, f"{gethostname()}:{config.serve.port}{replica and f'/{replica}'}"
        if not config.follows:
            if config.follow_drafts:
                log.warning("%s", UNDRAFTED.fallback)
            engine = await _measured(config, config.engine_params())
            follow = capture = None
        else:
            target = await asyncio.to_thread(describe, config.target_dir)
            if config.target_dir.is_relative_to(config.settings.cache):
                hold(config.target_dir)
            goldens, threshold = load_golden(config.target_dir)
            registry = open_registry(config.settings)
            if replica:
                fleet = RolloutStore(config.settings.querylog, f"target {target.sha256[:16]}", config.serve.rollout)
                member = Member(fleet, registry, own, logged_as=own)
            k = config.engine_params().num_draft_tokens
            source = DraftSource(registry, config.settings.cache, target, k, member)
            start = partial(_start, config, source)
            engine, boot, memory = await start_engine(start, source, config.memory, counts)
            follow = Reconciler(engine, source, goldens, threshold, config, boot, memory, counts)
        try:
            if follow is not None:
                files = CapturedFiles(config.settings.beside_log)
                capture = await Capture.start(engine, files, config.serve.capture, target.sha256)
            built = await Handlers.build(engine, config.serve.tool_parser, config.serve.structured)
            reasoning = await _reasoning(config, engine, built)
            settle = None if capture is None else capture.settle
            writer = BackgroundWriter(QueryLog(config.settings.querylog))
            rewrite = ChatEncoder.of(built.tokenizer).rewrite
            recorder = Recorder(writer, rewrite, config.target_version, settle=settle, server=own)
            events = Emitter(config.orchestrator)
            service = cls(config, engine, built, recorder, events, follow, capture, reasoning, member)
        except BaseException:
            await engine.close()
            raise
        service._begin()
        return service

    def _begin(self) -> None:
        """Start what runs beside the requests."""
        if self.member is not None:
            self._joined.enter_context(self.member.store.taking_part(self.member.name))
        self.background.start("drift detector", self._detect_drift())
        self.background.start("erasures", self._follow_erasures())
        if self._capture is not None:
            self.background.start("capture", self._capture.run())
        if self.reconciler is not None:
            recent, tell = self.recorder.recent, self._tell
            self.reconciler.hooks = ReplicaHooks(lambda: self.admission.in_flight, recent, tell)
            self.background.start("reconciler", self.reconciler.run())

    async def set_speculation(self, on: bool) -> bool:
        """Switch speculation for an operator; returns whether the engine speculates."""
        return self.reconciler is not None and await self.reconciler.set_speculation(on)

    def unready(self) -> str | None:
        """Return why new requests are better sent to another replica, though this one answers; None if they aren't."""
        if self.admission.draining:
            return "the service is shutting down"
        if self.reconciler is not None and not self.reconciler.has_looked:
            return "the draft that the service started with is on probation"
        return None

    def require_no_replacement(self) -> None:
        """Raise RuntimeError if only a new replica can serve what the registry wants."""
        if self.reconciler is not None and self.reconciler.state.replacement is not None:
            raise RuntimeError(self.reconciler.state.replacement)

    def status(self) -> ServiceStatus:
        """Return what /redraft/status shows."""
        state, counts = UNDRAFTED if self.config.follow_drafts else UNFOLLOWED, Counter[str]()
        if self.reconciler is not None:
            state, counts = self.reconciler.state, self.reconciler.counts
        now_s = time.monotonic()
        return ServiceStatus(
            replica="" if self.member is None else self.member.name,
            phase=state.phase,
            champion=state.champion,
            draft_version=state.serving.version.number if state.serving else None,
            speculating=self.engine.speculating,
            throughput=None if (plan := self.engine.llm.throughput) is None else plan.at(self.admission.in_flight),
            speed=of_domains(self.engine.llm.speeds),
            mode=str(self.engine.mode),
            unplanned=self.engine.unplanned or None,
            fallback=state.fallback,
            fault=state.fault,
            failed_tasks=dict(self.background.failed),
            replacement=state.replacement,
            swaps=counts["swaps"],
            swap_ms=state.swap_ms,
            proof=state.proof,
            refused=state.refused,
            postponed={name: one.describe(now_s) for name, one in state.postponed.items()},
            reconciler=counts,
            acceptance=self.recorder.acceptance(self.engine.draft_version),
            acceptance_by_context=self.recorder.acceptance_by_context(self.engine.draft_version),
            longest_context=self.recorder.longest_context(),
            coverage=self.recorder.coverage.shares(),
            log=self.recorder.counts(),
            captured={} if self._capture is None else self._capture.counts,
            events=self._events.counts(),
            seeded=self._num_seeded,
            tokens=self.recorder.tokens,
            accepted=dict(self.recorder.accepted),
            requests={str(status): number for status, number in sorted(self.admission.responses.items())},
            in_flight=self.admission.in_flight,
            target_version=self.config.target_version,
            served_name=SERVED_NAME,
            uptime_s=round(now_s - self._started_s, 3),
        )

    async def drain(self) -> int:
        """Refuse new requests, wait for the running ones, and return how many were left at the end of the time."""
        self.admission.draining = True
        deadline_s = time.monotonic() + self.config.serve.drain_s
        while self.admission.in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        return self.admission.in_flight

    async def close(self) -> None:
        """End the loop, write what was recorded, end the engine's processes."""
        await self.background.close()
        await asyncio.to_thread(self._joined.close)
        await asyncio.to_thread(self.recorder.close)
        await asyncio.to_thread(self._events.close)
        if self.reasoning is not None:
            await self.reasoning.close()
        await self.engine.close()

    def _options_of(self, generation_id: str, params: Any) -> DraftOptions:
        """Return how a generation with vLLM's SamplingParams is to be drafted; the engine asks in the event loop."""
        origin = self.recorder.origin_of(generation_id)
        if origin is None:
            return DraftOptions("auto")
        if self._plain_seeds and is_seeded(params):
            self._num_seeded += 1
            return DraftOptions("off")
        if origin.speculation == "off":
            return DraftOptions("off")
        serving = None if self.reconciler is None else self.reconciler.state.serving
        alone = origin.speculation == "head" or (tells_of_draft(params) and self._draws(origin.domain))
        return DraftOptions(
            drafting="head" if alone else "auto",
            domain=origin.domain,
            key=origin.key or "",
            promised=serving.version.lineage.tau.get(origin.domain, 0.0) if serving is not None else 0.0,
            capture="" if self._capture is None else self._capture.name_for(generation_id, origin),
        )

    def _draws(self, domain: str) -> bool:
        num = self.admission.in_flight
        lost = 0.0 if (throughput := self.engine.llm.throughput) is None else throughput.overhead_of(num) * num
        return self._alone.draws(self.engine.draft_version, domain, domain in self._drift.doubted, lost)

    def _tell(self, event: str, text: str) -> None:
        self._events.emit(event, EVERY_DOMAIN, {"text": text})

    async def _follow_erasures(self) -> None:
        """Forget recent answers when rows were erased: which of them were the person's, nobody knows any more."""
        erasures = QueryLog(self.config.settings.querylog).erasures
        seen: int | None = None
        could = True
        while True:
            try:
                last = await asyncio.to_thread(erasures.last)
            except (OSError, ValueError) as error:
                if could:  # said once, not at every look
                    log.warning("the query log can't be asked whether rows were erased: %s", error)
                could = False
            else:
                if seen is not None and last > seen:
                    num_tokens = await self.engine.forget_answers()
                    log.warning("erasure %d: forgot %d tokens of recent answers", last, num_tokens)
                seen, could = last, True
            await asyncio.sleep(ERASURES_S)

    async def _detect_drift(self) -> None:
        """Look for as long as the service runs; of a draft that is being replaced nothing needs to be told."""
        while True:
            await asyncio.sleep(self.config.serve.drift_detector.period_s)
            state = UNFOLLOWED if self.reconciler is None else self.reconciler.state
            if state.serving is None or (version := state.serving.version).number != state.champion:
                continue
            if self._drift.follow(version):
                vocabulary = await asyncio.to_thread(read_vocabulary, state.serving.directory)
                self.recorder.coverage.follow(str(version.number), vocabulary)
            if self.member is None:
                await self._drift.hear(self.recorder.recent(str(version.number), self._drift.last))
            elif self.member.leads:
                log_of = self.config.settings.querylog
                await self._drift.hear(await asyncio.to_thread(counts_of, log_of, version.number, self._drift.last))


def plain_seeds(config: ServiceConfig, engine: VllmEngine) -> bool:
    """Return whether requests with a seed and a temperature are decoded without drafts."""
    return config.serve.seeded == "plain" or (config.serve.seeded == "auto" and engine.vllm_drafts)


async def _reasoning(config: ServiceConfig, engine: VllmEngine, handlers: Handlers) -> Reasoning | None:
    """Start the small model, if the recipe names one."""
    if not config.serve.reasoning.model:
        return None
    length, tokenizer = config.engine_params().max_model_len, handlers.tokenizer
    reasoning = await Reasoning.start(engine, config.target_dir, length, SERVED_NAME, tokenizer, config.serve.reasoning)
    reasoning.plain_seeds = plain_seeds(config, engine)
    return reasoning


async def _start(config: ServiceConfig, source: DraftSource, draft: Loaded | None) -> VllmEngine:
    """Start an engine with a draft, or with the target alone."""
    params = config.engine_params()
    if draft is None:
        return await _measured(config, params)
    version, k, configured = str(draft.version.number), source.served_k(draft.version), params.num_draft_tokens
    if k != configured:
        told = "the engine drafts %d tokens a step, as draft %s was gated at; num_draft_tokens is %d"
        log.warning(told, k, version, configured)
    own = params.model_copy(update={"num_draft_tokens": k})
    return await _measured(config, own, draft.directory, version)


async def _measured(config: ServiceConfig, params: Params, draft: Path | None = None, version: str = "") -> VllmEngine:
    """Start an engine, and measure what its steps take."""
    costs, captures = config.settings.costs, config.serve.capture.is_on
    engine = await VllmEngine.start(
        config.target_dir, draft, params, SERVED_NAME, version, costs, serves=True, captures=captures
    )
    try:
        await measure(engine)
    except BaseException:
        await engine.close()
        raise
    return engine
