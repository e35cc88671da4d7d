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
from infra.status import Proof
from infra.store import NotFound, ObjectsUnavailable, StoreUnavailable
from infra.versions import Version, is_quarantined, label
from models.core.evaluation.acceptance import AcceptanceCount, mean_accepted_length
from models.core.evaluation.golden import (
    Answer,
    CanaryParams,
    Finding,
    Golden,
    equal_output,
    first_difference,
    has_fallen,
    judge,
    lost_on_canaries,
    lost_on_traffic,
)
from models.engines import Completion, Engine, NotSwitchable, Sampling
from models.serving import Probation
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
from services.swap import Action, Event

# Turns in a full engine; requests have 0. A probation is short, and until it ends an unproven draft serves; canary
# prompts come after every request, whose turn is how many sequences their key runs.
FIRST, LAST = -1, 1 << 16
NUM_LOOKS = 2
# Tokens of a golden prompt that are read in one step: every stream waits for each of them.
PIECE = 64

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


class TargetDiffers(RuntimeError):
    """The target alone gives another output than its reference too, so that no draft can be tested by it."""


class GoldenPrompts:
    """What an engine answers with a draft, against the target's reference outputs and their near-tie threshold.

    Before a draft is blamed for an output, the target alone is asked for it, with the engine's speculation off; other
    requests are not drafted for meanwhile. Speculation is left off then: the caller knows whether it is wanted.
    """

    def __init__(self, engine: Engine, goldens: Sequence[Golden], threshold: float) -> None:
        self._engine, self._goldens, self._threshold = engine, goldens, threshold

    async def prove(self, draft: Loaded, settings: Probation) -> tuple[Proof, tuple[Answer, ...]]:
        """Check a draft that was just loaded, ahead of the traffic that waits; ValueError says in what it failed.

        TargetDiffers: the target failed, with or without the draft.
        """
        promised = draft.version.lineage.golden_tau
        if promised is None:
            raise ValueError("tag golden_tau is empty, wanted the mean accepted length on the golden prompts")
        error = await self._engine.check_draft(draft.directory)
        asked, name = self._goldens[: settings.num_prompts], f"golden-{draft.version.number}"
        completions = await self._answer(asked, name, FIRST)
        verdicts = self._verdicts(asked, completions)
        if "different" in verdicts:
            if (own := await self._differs_itself(asked, completions, name, FIRST)) is not None:
                raise ValueError(f"golden prompt {own} gave another output than the target alone")
            num_parting = verdicts.count("different")
            raise TargetDiffers(f"the target alone parts from its reference too, on {num_parting} golden prompts")
        traces = [completion.trace("golden") for completion in completions]
        if not any(any(trace.drafted) for trace in traces):
            raise ValueError(f"nothing was drafted on {len(traces)} golden prompts")
        tau, wanted = mean_accepted_length(traces), 1 + (promised - 1) * (1 - settings.tolerance)
        if tau < wanted:
            raise ValueError(f"mean accepted length on the golden prompts is {tau:.3f}, promised {promised:.3f}")
        proof = Proof(weight_error=error, num_near_ties=verdicts.count("near-tie"), tau=tau, promised_tau=promised)
        return proof, _answers(completions)

    async def look(
        self,
        number: int,
        reference: Sequence[Answer],
        lost_on_traffic: Callable[[], float | None],
        params: CanaryParams,
    ) -> tuple[Finding, str]:
        """Ask the served draft the canary prompts, after all traffic, and say what was found, in a word and in a line.

        A fall is believed when a second look sees it. `reference` is what the draft answered on probation;
        `lost_on_traffic` returns the share of the promised gain that is missing.
        """
        asked, name, lost = self._goldens[: len(reference)], f"golden-{number}-canary", None
        for _ in range(NUM_LOOKS):
            completions: list[Completion] = []
            for golden in asked:  # one at a time, so that a user shares the engine with one of them at most
                completions += await self._answer([golden], f"{name}-{len(completions)}", LAST)
            if "different" in self._verdicts(asked, completions):
                if (own := await self._differs_itself(asked, completions, name, LAST)) is None:
                    return Finding.TARGET, "the target alone parts from its reference on a canary prompt"
                return Finding.PAIR, f"with draft {number} canary prompt {own} gives another output"
            lost = lost_on_canaries(reference, _answers(completions))
            if not has_fallen(lost, params):
                return Finding.SOUND, ""
        traffic = lost_on_traffic()
        said = "too little traffic to say" if traffic is None else f"{traffic:.0%} on traffic"
        return judge(lost, traffic, params), f"draft {number} lost {lost:.0%} on canary prompts, {said}"

    def _verdicts(self, asked: Sequence[Golden], completions: Sequence[Completion]) -> list[str]:
        pairs = zip(asked, completions, strict=True)
        return [equal_output(golden, one.token_ids, self._threshold) for golden, one in pairs]

    async def _differs_itself(
        self, asked: Sequence[Golden], completions: Sequence[Completion], name: str, priority: int
    ) -> int | None:
        """Return the first prompt that the draft alone answers otherwise; None if the target does too."""
        verdicts = enumerate(self._verdicts(asked, completions))
        different = [index for index, verdict in verdicts if verdict == "different"]
        try:
            await self._engine.set_speculation(False)
        except NotSwitchable as error:  # a target of other arithmetic is no fault of the draft's
            message = f"golden prompt {different[0]} gave another output, of unknown cause: {error}"
            raise TargetDiffers(message) from error
        alone = await self._answer([asked[index] for index in different], f"{name}-alone", priority)
        pairs = zip(different, alone, strict=True)
        return next((index for index, one in pairs if _parts_first(asked[index], completions[index], one)), None)

    async def _answer(self, goldens: Sequence[Golden], name: str, priority: int) -> list[Completion]:
        """Answer golden prompts side by side, each sent when the one before has been read.

        Every stream waits while the engine reads what came together, and one after the other they would take too many
        steps. When one fails the others are called off.
        """
        turns = [asyncio.Event() for _ in range(len(goldens) + 1)]
        turns[0].set()

        async def ask(index: int, golden: Golden) -> Completion:
            await turns[index].wait()
            sampling = Sampling(max_tokens=len(golden.token_ids), priority=priority, piece=PIECE)
            read = turns[index + 1].set
            return await self._engine.generate(list(golden.prompt_ids), sampling, f"{name}-{index}", read)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(index, golden)) for index, golden in enumerate(goldens)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def _answers(completions: Sequence[Completion]) -> tuple[Answer, ...]:
    """Return what later answers to the same prompts are held against."""
    return tuple(Answer(one.token_ids, one.drafted, one.accepted) for one in completions)


def _parts_first(golden: Golden, drafted: Completion, alone: Completion) -> bool:
    """Whether an output parts from the reference where the target alone still follows it."""
    of_both = (first_difference(golden.token_ids, one.token_ids) for one in (drafted, alone))
    drafted_parts, alone_parts = (len(golden.token_ids) if at is None else at for at in of_both)
    return drafted_parts < alone_parts
