"""The loop that makes the served draft follow alias `champion`, and takes a bad draft back by itself.

What follows from what is decided in services/transitions.py; here it is done. The loop runs as a task beside the
requests: what blocks (registry, disk) goes to a thread, what touches the engine is one call between two steps. Requests
never wait for it and never fail by it. The ladder on failure: candidate, last good, no speculation.

An operator's switch does not wait for the loop: its event is fed in between, where the loop awaits something. So what
an action reads of the state it reads when it needs it, and the engine takes calls in the order in which they were made.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from infra.store import NotFound, StoreUnavailable
from infra.versions import Version, is_quarantined
from models.engines import Engine
from models.evaluation.acceptance import Tally
from models.evaluation.canary import lost_on_traffic
from models.evaluation.golden import Golden
from services import events, transitions
from services.canaries import look
from services.config import ServiceConfig
from services.drafts import DraftSource, OtherReplica, ShortOfMemory, Unfit, remember, require_room
from services.events import Action, Event
from services.probation import TargetDiffers, prove
from services.states import DraftState, Loaded, Memory, Patience, label

log = logging.getLogger(__name__)


class Surroundings(NamedTuple):
    """What the loop asks of the service around it.

    Attributes:
        num_in_flight: returns how many requests are being answered.
        recent: returns the last requests that began with a draft, the oldest first.
        tell: takes an event for the orchestrator, and a line about it.
    """

    num_in_flight: Callable[[], int] = lambda: 0
    recent: Callable[[str], Sequence[Tally]] = lambda draft: ()
    tell: Callable[[str, str], None] = lambda event, text: None


class Reconciler:
    """Follows the registry for one engine.

    Attributes:
        counts: what happened so often: swaps, reverts, refused, unfit, postponed, deferred, called_off, late,
            registry_unavailable, errors; canaries, and of these canaries_fell, canaries_undecided, target_differs and
            broken_pairs.
        surroundings: the service that it runs in.
    """

    def __init__(
        self,
        engine: Engine,
        source: DraftSource,
        goldens: Sequence[Golden],
        threshold: float,
        config: ServiceConfig,
        boot: Loaded | None,
        memory: Memory,
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        self.surroundings = Surroundings()
        self._engine, self._source, self._goldens, self._threshold = engine, source, goldens, threshold
        self._config = config
        postponed = memory.postponed(self._patience(), time.monotonic())
        self._state = replace(DraftState.started(boot, memory), postponed=postponed)
        self._trial: asyncio.Task[Event] | None = None

    @property
    def state(self) -> DraftState:
        """Where the replica stands now."""
        return self._state

    async def run(self) -> None:
        """Tick for ever; whatever fails is counted and tried again at the next tick."""
        while True:
            try:
                await self.tick()
            except StoreUnavailable as error:
                self.counts["registry_unavailable"] += 1
                log.warning("the registry is unavailable: %s", error)
            except Exception:  # the edge: the loop must outlive every fault
                self.counts["errors"] += 1
                log.exception("a look at the registry failed")
            await asyncio.sleep(self._config.serve.poll_s)

    async def tick(self) -> None:
        """Look once, and bring the engine in line.

        Raises:
            StoreUnavailable: nothing was changed, the last good draft serves.
        """
        await self._feed(events.Ticked(time.monotonic(), self.surroundings.num_in_flight()))

    async def set_speculation(self, on: bool) -> bool:
        """Do what an operator wants, at once; return whether there is speculation, never without a good draft."""
        await self._feed(events.Switched(on))
        return self._state.speculates

    async def _feed(self, event: Event) -> None:
        """Take the step that an event asks for, and all that follows from it."""
        self._state, actions = transitions.step(self._state, event, self._patience())
        for action in actions:
            await self._do(action)

    def _patience(self) -> Patience:
        serve = self._config.serve
        return Patience(
            serve.probation.timeout_s, serve.min_swap_interval_s, serve.canary.period_s, serve.canary.max_in_flight
        )

    async def _do(self, action: Action) -> None:
        match action:
            case events.Count(name, text):
                self.counts[name] += 1
                if text:
                    log.warning("%s", text)
            case events.Say(text):
                log.info("%s", text)
            case events.Tell(event, text):
                self.surroundings.tell(event, text)
            case events.Report():
                await self._report()
            case events.Ask():
                champion = await asyncio.to_thread(self._source.champion)
                await self._feed(events.Named(champion, time.monotonic()))
            case events.Fetch(version):
                await self._feed(await self._fetch(version))
            case events.Inspect(version):
                entry = await asyncio.to_thread(self._source.registry.get, "draft", version.number)
                if is_quarantined(entry):
                    await self._feed(events.Quarantined(entry, entry.quarantined))
            case events.Prove(draft):
                await self._await(draft, self._config.serve.probation.timeout_s, self._prove(draft))
            case events.Try(draft):
                await self._await(draft, self._config.serve.probation.timeout_s, self._try(draft))
            case events.Check(draft):
                await self._await(draft, self._config.serve.canary.timeout_s, self._check(draft))
            case events.CallOff():
                if self._trial is not None:
                    self._trial.cancel()
            case events.PutBack():
                await self._put_back()
            case events.SetSpeculation(on):
                await self._engine.set_speculation(on)
            case events.Remember():
                await asyncio.to_thread(remember, self._config.state, self._state.memory, self.counts)

    async def _fetch(self, version: Version) -> Event:
        try:
            draft = await self._ready(version)
            require_room(draft, self._config.serve.min_free_memory_gib)
        except Unfit as error:
            return events.MadeForAnother(version, str(error))
        except OtherReplica as error:
            return events.NeedsReplica(version, str(error), await asyncio.to_thread(self._goes_back, version))
        except ShortOfMemory as error:
            return events.NoRoom(version, str(error), time.monotonic())
        except ValueError as error:
            return events.Failed(version, str(error), time.monotonic())
        return events.Fetched(draft, time.monotonic())

    def _goes_back(self, champion: Version) -> bool:
        """Return whether a newer draft than the champion was quarantined, one of those that this replica is about."""
        state = self._state
        own = [draft.version.number for draft in (state.boot, state.serving) if draft is not None]
        newer = own or [int(name.partition("-")[0]) for name in state.memory.refused]
        return any(
            is_quarantined(self._source.registry.get("draft", number)) for number in newer if number > champion.number
        )

    async def _ready(self, version: Version) -> Loaded:
        """Fetch a version and check that it can be swapped in; raises what `DraftSource` does."""
        draft = Loaded(version, await asyncio.to_thread(self._source.fetch, version))
        await asyncio.to_thread(self._source.require_swappable, draft, self._state.boot)
        return draft

    async def _await(self, draft: Loaded, timeout_s: float, trial: Coroutine[Any, Any, Event]) -> None:
        """Feed back how a trial of a draft ended; what it raises besides a fault of the draft is raised again."""
        self._trial = asyncio.create_task(trial)
        try:
            async with asyncio.timeout(timeout_s):
                ended: Event = await self._trial
        except asyncio.CancelledError:
            if self._is_cancelled():
                raise  # the loop itself is to end
            ended = events.CalledOff()
        except ValueError as error:
            ended = events.Failed(draft.version, str(error), time.monotonic())
        except TimeoutError:
            ended = events.Undecided(f"took more than {timeout_s:g} s", time.monotonic())
        except TargetDiffers as error:
            ended = events.Undecided(str(error), time.monotonic())
        except Exception as error:
            self._trial = None
            await self._feed(events.Undecided(type(error).__name__, time.monotonic()))
            raise
        self._trial = None
        await self._feed(ended)

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def _try(self, draft: Loaded) -> Event:
        swap_ms = await self._engine.swap_draft(draft.directory, str(draft.version.number))
        await self._feed(events.Swapped(swap_ms))
        return await self._prove(draft)

    async def _prove(self, draft: Loaded) -> Event:
        await self._engine.set_speculation(True)
        settings = self._config.serve.probation
        return events.Passed(
            *await prove(self._engine, draft.directory, draft.version, self._goldens, self._threshold, settings)
        )

    async def _check(self, draft: Loaded) -> Event:
        params, version = self._config.serve.canary, draft.version

        def lost() -> float | None:
            return lost_on_traffic(version.lineage.tau, self.surroundings.recent(str(version.number)), params)

        found = await look(self._engine, version, self._goldens, self._threshold, self._state.answers, lost, params)
        return events.Checked(*found, time.monotonic())

    async def _put_back(self) -> None:
        """Load the last good draft again; the engine keeps serving meanwhile."""
        try:
            async with asyncio.timeout(self._config.serve.probation.put_back_s):
                draft = await self._load_good()
        except TimeoutError:
            await self._feed(events.Late())
        else:
            await self._feed(events.Exhausted() if draft is None else events.Restored(draft))

    async def _load_good(self) -> Loaded | None:
        """Return the first good draft that could be loaded."""
        for good in self._state.fallbacks():
            number = good.version.number if isinstance(good, Loaded) else good.number
            try:
                draft = good if isinstance(good, Loaded) else await self._ready(good)
            except (ValueError, OSError) as error:
                log.warning("draft %s can't be fallen back to: %s", number, error)
                continue
            try:
                await self._engine.swap_draft(draft.directory, str(number))
                await self._engine.check_draft(draft.directory)
                await self._engine.set_speculation(self._state.wanted)
            except Exception:  # the next rung must be reached whatever this one did
                self.counts["errors"] += 1
                log.exception("draft %s could not be put back", number)
            else:
                return draft
        return None

    async def _report(self) -> None:
        registry = self._source.registry
        for name, reason in self._state.unreported.items():
            number = int(name.partition("-")[0])
            try:
                # After a restart the registry may be another one, with another version of this number.
                if label(await asyncio.to_thread(registry.get, "draft", number)) == name:
                    await asyncio.to_thread(registry.revert, "draft", number, reason)
            except NotFound:
                log.warning("draft %s was refused and is gone from the registry", number)
            await self._feed(events.Reported(name))
