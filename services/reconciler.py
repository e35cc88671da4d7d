"""The loop that makes the served draft follow the champion, and takes a bad draft back by itself.

What follows from what is decided in services/swap.py; here it is done. The loop runs as a task beside the requests:
what blocks (registry, disk) goes to a thread, what touches the engine is one call between two steps. Requests never
wait for it and never fail by it. The ladder on failure: candidate, last good, no speculation.

An operator's switch does not wait for the loop: its event is fed in between, where the loop awaits something. So what
an action reads of the state it reads when it needs it, and the engine takes calls in the order in which they were made.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from infra.events import PAIR_BROKE
from infra.rollouts import NeedsStart
from infra.store import NotFound, ObjectsUnavailable, StoreUnavailable
from infra.versions import Version, is_quarantined, label
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.golden import (
    Golden,
    lost_on_traffic,
)
from models.engines import Engine, NotSwitchable
from services import swap
from services.config import ServiceConfig
from services.drafts import (
    DraftHistory,
    DraftSource,
    DraftState,
    Incompatible,
    Loaded,
    NeedsReplacement,
    ShortOfMemory,
    remember,
    require_room,
)  # fmt: skip
from services.probation import GoldenPrompts, TargetDiffers
from services.swap import Action, Event

log = logging.getLogger(__name__)


class ReplicaHooks(NamedTuple):
    """What the loop asks of the service around it."""

    num_in_flight: Callable[[], int] = lambda: 0
    recent: Callable[[str], Sequence[AcceptanceCount]] = lambda draft: ()  # the oldest first
    tell: Callable[[str, str], None] = lambda event, text: None


class Reconciler:
    """Follows the registry for one engine; `counts` says what happened how often, by the names of `swap.Count`."""

    def __init__(
        self,
        engine: Engine,
        source: DraftSource,
        goldens: Sequence[Golden],
        threshold: float,
        config: ServiceConfig,
        boot: Loaded | None,
        memory: DraftHistory,
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        self.hooks = ReplicaHooks()
        self._engine, self._source, self._config = engine, source, config
        self._prompts = GoldenPrompts(engine, goldens, threshold)
        postponed = memory.postponed(config.serve, time.monotonic())
        started = DraftState.started(boot, memory)
        self.state = replace(started, postponed=postponed, in_fleet=source.member is not None)
        self.has_looked = False  # after the first look the draft it started with is proven, postponed or refused
        self._trial: asyncio.Task[Event] | None = None

    async def run(self) -> None:
        while True:
            await self.look()
            self.has_looked = True
            await asyncio.sleep(self._config.serve.poll_s)

    async def look(self) -> None:
        """Tick; whatever fails is counted and tried again at the next tick."""
        try:
            await self.tick()
        except StoreUnavailable as error:
            self.counts["registry_unavailable"] += 1
            log.warning("the registry is unavailable: %s", error)
        except Exception:  # the edge: the loop must outlive every fault
            self.counts["errors"] += 1
            log.exception("a look at the registry failed")

    async def tick(self) -> None:
        """Look once, and bring the engine in line; at StoreUnavailable nothing changed, the last good draft serves."""
        await self._feed(partial(swap.ticked, now_s=time.monotonic(), in_flight=self.hooks.num_in_flight()))
        self._source.let_go(self.state)

    async def set_speculation(self, on: bool) -> bool:
        """Do what an operator wants, at once; return whether there is speculation, never without a good draft."""
        await self._feed(partial(swap.switched, on=on))
        return self.state.speculates

    async def _feed(self, event: Event) -> None:
        """Take the step of an event, and all that follows from it."""
        self.state, actions = event(self.state, self._config.serve)
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        serve = self._config.serve
        match action:
            case swap.Count(name, text):
                self.counts[name] += 1
                if text:
                    log.warning("%s", text)
            case swap.Say(text):
                log.info("%s", text)
            case swap.Tell(event, text):
                self.hooks.tell(event, text)
            case swap.Report():
                await self._report()
            case swap.Ask():
                champion = await asyncio.to_thread(self._source.champion, self.state)
                await self._feed(partial(swap.named, champion=champion, now_s=time.monotonic()))
            case swap.Fetch(version):
                await self._feed(await self._fetch(version))
            case swap.Inspect(version):
                entry = await asyncio.to_thread(self._source.registry.get, "draft", version.number)
                if is_quarantined(entry):
                    await self._feed(partial(swap.quarantined, version=entry, reason=entry.quarantined))
            case swap.Prove(draft):
                await self._await(draft, serve.probation.timeout_s, self._prove(draft))
            case swap.Try(draft):
                await self._await(draft, serve.probation.timeout_s, self._try(draft))
            case swap.Check(draft):
                await self._await(draft, serve.canary.timeout_s, self._check(draft))
            case swap.CallOff():
                if self._trial is not None:
                    self._trial.cancel()
            case swap.PutBack():
                await self._put_back()
            case swap.SetSpeculation(on):
                try:
                    await self._engine.set_speculation(on)
                except NotSwitchable as error:  # the last rung is the operator
                    self.counts["not_switched"] += 1
                    log.warning("%s; replace its draft by hand", error)
                    self.hooks.tell(PAIR_BROKE, str(error))
            case swap.Remember():
                await asyncio.to_thread(remember, self._config.memory, self.state.memory, self.counts)

    async def _fetch(self, version: Version) -> Event:
        try:
            draft = await self._ready(version)
            require_room(draft, self._config.serve.min_free_memory_gib)
        except Incompatible as error:
            return partial(swap.unfit, version=version, reason=str(error))
        except NeedsReplacement as error:
            if self._source.member is not None:
                await asyncio.to_thread(self._source.member.store.tell, NeedsStart(draft=label(version)))
                reason = f"{error}; the next start of all replicas serves it"
                return partial(swap.unfit, version=version, reason=reason)
            goes_back = await asyncio.to_thread(self._goes_back, version)
            return partial(swap.needs_replica, version=version, reason=str(error), goes_back=goes_back)
        except ShortOfMemory as error:
            return partial(swap.no_room, version=version, reason=str(error), now_s=time.monotonic())
        except ObjectsUnavailable as error:
            return partial(swap.out_of_reach, version=version, reason=str(error), now_s=time.monotonic())
        except ValueError as error:
            return partial(swap.failed, version=version, reason=str(error), now_s=time.monotonic())
        return partial(swap.fetched, draft=draft, now_s=time.monotonic())

    def _goes_back(self, champion: Version) -> bool:
        """Return whether a newer draft than the champion was quarantined, one of those that this replica is about."""
        state = self.state
        own = [draft.version.number for draft in (state.boot, state.serving) if draft is not None]
        newer = own or [int(name.partition("-")[0]) for name in state.memory.refused]
        return any(
            is_quarantined(self._source.registry.get("draft", number)) for number in newer if number > champion.number
        )

    async def _ready(self, version: Version) -> Loaded:
        """Fetch a version and check that it can be swapped in; raises what `DraftSource` does."""
        draft = Loaded(version, await asyncio.to_thread(self._source.fetch, version))
        await asyncio.to_thread(self._source.require_swappable, draft, self.state.boot)
        return draft

    async def _await(self, draft: Loaded, timeout_s: float, trial: Coroutine[Any, Any, Event]) -> None:
        """Feed back how a trial of a draft ended; what it raises besides a fault of the draft is raised again."""
        self._trial = asyncio.create_task(trial)
        try:
            async with asyncio.timeout(timeout_s):
                ended: Event = await self._trial
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the loop itself is to end
            ended = swap.called_off
        except ValueError as error:
            ended = partial(swap.failed, version=draft.version, reason=str(error), now_s=time.monotonic())
        except (TimeoutError, TargetDiffers) as error:
            reason = str(error) if isinstance(error, TargetDiffers) else f"took more than {timeout_s:g} s"
            ended = partial(swap.undecided, reason=reason, now_s=time.monotonic())
        except Exception as error:
            self._trial = None
            await self._feed(partial(swap.undecided, reason=type(error).__name__, now_s=time.monotonic()))
            raise
        self._trial = None
        await self._feed(ended)

    async def _try(self, draft: Loaded) -> Event:
        swap_ms = await self._engine.swap_draft(draft.directory, str(draft.version.number))
        await self._feed(partial(swap.swapped, swap_ms=swap_ms))
        return await self._prove(draft)

    async def _prove(self, draft: Loaded) -> Event:
        await self._engine.set_speculation(True)
        proof, answers = await self._prompts.prove(draft, self._config.serve.probation)
        return partial(swap.passed, proof=proof, answers=answers)

    async def _check(self, draft: Loaded) -> Event:
        params, version = self._config.serve.canary, draft.version

        def lost() -> float | None:
            return lost_on_traffic(version.lineage.tau, self.hooks.recent(str(version.number)), params)

        finding, text = await self._prompts.look(version.number, self.state.answers, lost, params)
        return partial(swap.checked, finding=finding, text=text, now_s=time.monotonic())

    async def _put_back(self) -> None:
        """Load the last good draft again; the engine keeps serving meanwhile."""
        try:
            async with asyncio.timeout(self._config.serve.probation.put_back_s):
                draft = await self._load_good()
        except TimeoutError:
            await self._feed(swap.late)
        else:
            await self._feed(swap.exhausted if draft is None else partial(swap.restored, draft=draft))

    async def _load_good(self) -> Loaded | None:
        """Return the first good draft that could be loaded."""
        for good in self.state.fallbacks():
            number = good.version.number if isinstance(good, Loaded) else good.number
            try:
                draft = good if isinstance(good, Loaded) else await self._ready(good)
            except (ValueError, OSError) as error:
                log.warning("draft %s can't be fallen back to: %s", number, error)
                continue
            try:
                await self._engine.swap_draft(draft.directory, str(number))
                await self._engine.check_draft(draft.directory)
                await self._engine.set_speculation(self.state.wanted)
            except Exception:  # the next rung must be reached whatever this one did
                self.counts["errors"] += 1
                log.exception("draft %s could not be put back", number)
            else:
                return draft
        return None

    async def _report(self) -> None:
        registry = self._source.registry
        for name, reason in (await asyncio.to_thread(self._source.to_report, self.state)).items():
            number = int(name.partition("-")[0])
            try:
                # After a restart the registry may be another one, with another version of this number.
                if label(await asyncio.to_thread(registry.get, "draft", number)) == name:
                    await asyncio.to_thread(registry.revert, "draft", number, reason)
            except NotFound:
                log.warning("draft %s was refused and is gone from the registry", number)
            await asyncio.to_thread(self._source.reported, name)
            await self._feed(partial(swap.reported, name=name))
