"""The loop that makes the served draft follow alias `champion`, and takes a bad draft back by itself.

It runs as a task beside the requests: what blocks (registry, disk) goes to a thread, what touches the engine is one
call between two steps. Requests never wait for it and never fail by it. The ladder on failure: candidate, last good, no
speculation. A draft that the running engine can't take by a swap (another shape, or it was started without one) makes
the replica ask to be replaced; the new one boots with it.

A draft that showed a fault of its own is refused for good. One that could not be judged, because the engine failed or
was too busy to answer the golden prompts in time, is postponed: tried again after a wait that doubles each time. The
draft that a replica booted with goes on serving meanwhile, and another champion is followed at once.

While an operator has speculation switched off nothing is swapped: a probation would have nothing to measure.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from infra.registry import Version, is_quarantined
from infra.store import NotFound, StoreUnavailable
from models.engines import Engine
from models.golden import Golden
from services.config import ServiceConfig
from services.drafts import DraftSource, Loaded, State, Unfit, label, write_state
from services.probation import Proof, prove

MAX_WAIT_S = 3600.0

log = logging.getLogger(__name__)


class Postponed(NamedTuple):
    """A draft that could not be judged.

    Attributes:
        num_attempts: how many failed.
        reason: why the last one did.
        wait_s: how long the next one waits.
        due_s: when that is over, on the monotonic clock.
    """

    num_attempts: int
    reason: str
    wait_s: float
    due_s: float

    def describe(self) -> str:
        """Say it in a line, with the seconds that are left."""
        left_s = self.due_s - time.monotonic()
        when = f"comes in {left_s:.0f} s" if left_s > 0 else "is due"
        return f"attempt {self.num_attempts} failed: {self.reason}; the next {when}"


class Reconciler:
    """Follows the registry for one engine.

    Attributes:
        counts: what happened so often: swaps, reverts, refused, unfit, postponed, deferred, registry_unavailable,
            errors.
        refused: why versions are not served, by label.
        postponed: the drafts that are tried again later, by label: the champion, and the one the replica booted with.
        serving: the draft in the engine; None without one, or while only speculation off is safe.
        champion: the number that the registry named last.
        fallback: why speculation is off, None while it may be on.
        replacement: why this replica must be replaced, None while it need not.
        proof: what the served draft showed on probation.
        swap_ms: how long the last swap took.
    """

    def __init__(
        self,
        engine: Engine,
        source: DraftSource,
        goldens: Sequence[Golden],
        threshold: float,
        config: ServiceConfig,
        boot: Loaded | None,
        state: State,
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        self.refused: dict[str, str] = dict(state.refused)
        self.postponed: dict[str, Postponed] = {}
        self.serving = boot
        self.champion: int | None = None
        self.fallback: str | None = None if boot else "no draft"
        self.replacement: str | None = None
        self.proof: Proof | None = None
        self.swap_ms: float | None = None
        self.wanted = True
        self._engine, self._source, self._goldens, self._threshold = engine, source, goldens, threshold
        self._config, self._boot, self._state = config, boot, state
        self._unreported: dict[str, str] = dict(state.refused)
        self._swapped_s: float | None = None
        self._turn = asyncio.Lock()

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
            await asyncio.sleep(self._config.poll_s)

    async def tick(self) -> None:
        """Look once, and bring the engine in line.

        Raises:
            StoreUnavailable: nothing was changed, the last good draft serves.
        """
        async with self._turn:
            serving = self.serving
            if self.wanted and serving is not None and self.proof is None and self._is_due(serving.version):
                await self._prove_boot(serving)
            await self._report()
            champion = await asyncio.to_thread(self._source.champion)
            self.champion = None if champion is None else champion.number
            self._forget_postponed(champion)
            if champion is None:
                await self._retire()
            elif self._is_new(champion):
                await self._follow(champion)

    async def set_speculation(self, on: bool) -> bool:
        """Do what an operator wants and return whether the engine speculates; it never does without a good draft."""
        async with self._turn:
            self.wanted = on
            speculating = on and self.fallback is None
            await self._engine.set_speculation(speculating)
            return speculating

    def _is_new(self, champion: Version) -> bool:
        if not self.wanted or self.replacement is not None or label(champion) in self.refused:
            return False
        if self.serving is not None and label(self.serving.version) == label(champion):
            return False
        now_s = time.monotonic()
        if self._swapped_s is not None and now_s - self._swapped_s < self._config.min_swap_interval_s:
            self.counts["deferred"] += 1
            return False
        return self._is_due(champion)

    def _is_due(self, version: Version) -> bool:
        postponed = self.postponed.get(label(version))
        return postponed is None or time.monotonic() >= postponed.due_s

    def _forget_postponed(self, champion: Version | None) -> None:
        """Drop the waits of drafts that are neither served nor wanted."""
        current = [champion, self.serving.version if self.serving else None]
        names = {label(version) for version in current if version is not None}
        self.postponed = {name: postponed for name, postponed in self.postponed.items() if name in names}

    async def _follow(self, version: Version) -> None:
        try:
            directory = await asyncio.to_thread(self._source.fetch, version)
        except Unfit as error:
            self.counts["unfit"] += 1
            self.refused[label(version)] = str(error)
            log.warning("draft %s does not fit: %s", version.number, error)
            return
        except ValueError as error:
            await self._refuse(version, str(error))
            return
        if self._boot is None:
            self.replacement = f"draft {version.number} came, and the engine was started without one"
            return
        try:
            await asyncio.to_thread(self._source.require_shape, directory, self._boot.directory)
        except ValueError as error:
            self.replacement = f"draft {version.number} has another shape: {error}"
            return
        await self._try(Loaded(version, directory))

    async def _try(self, candidate: Loaded) -> None:
        version = candidate.version
        self._swapped_s = time.monotonic()
        try:
            async with asyncio.timeout(self._config.probation.timeout_s):
                self.swap_ms = await self._engine.swap_draft(candidate.directory, str(version.number))
                self.counts["swaps"] += 1
                proof = await self._prove(candidate)
        except ValueError as error:
            await self._put_back()
            await self._refuse(version, str(error))
        except TimeoutError:
            self._postpone(version, self._too_long())
            await self._put_back()
        except Exception as error:
            self._postpone(version, type(error).__name__)
            await self._put_back()
            raise
        else:
            await self._accept(candidate, proof)

    def _postpone(self, version: Version, reason: str) -> None:
        self.counts["postponed"] += 1
        num_attempts, wait_s = 1, self._config.probation.timeout_s
        before = self.postponed.get(label(version))
        if before is not None:
            num_attempts, wait_s = before.num_attempts + 1, 2 * before.wait_s
        wait_s = min(wait_s, MAX_WAIT_S)
        postponed = Postponed(num_attempts, reason, wait_s, time.monotonic() + wait_s)
        self.postponed[label(version)] = postponed
        log.warning("draft %s is postponed: %s", version.number, postponed.describe())

    async def _prove_boot(self, boot: Loaded) -> None:
        try:
            async with asyncio.timeout(self._config.probation.timeout_s):
                proof = await self._prove(boot)
        except ValueError as error:
            self.serving = None
            await self._put_back(exclude=boot.version)
            await self._refuse(boot.version, str(error))
        except TimeoutError:
            self._postpone(boot.version, self._too_long())
        except Exception as error:
            self._postpone(boot.version, type(error).__name__)
            raise
        else:
            await self._accept(boot, proof)

    def _too_long(self) -> str:
        return f"more than {self._config.probation.timeout_s:g} s on probation"

    async def _prove(self, loaded: Loaded) -> Proof:
        await self._engine.set_speculation(True)
        return await prove(
            self._engine, loaded.directory, loaded.version, self._goldens, self._threshold, self._config.probation
        )

    async def _accept(self, loaded: Loaded, proof: Proof) -> None:
        self.serving, self.proof, self.fallback = loaded, proof, None
        self.postponed.pop(label(loaded.version), None)
        await self._remember(self._state.with_good(loaded.version))
        log.info("draft %s serves, mean accepted length %.3f on probation", loaded.version.number, proof.tau)

    async def _put_back(self, exclude: Version | None = None) -> None:
        """Load the last good draft again, or switch speculation off; the engine keeps serving either way."""
        self.counts["reverts"] += 1
        for good in await self._good_drafts(exclude):
            try:
                await self._engine.swap_draft(good.directory, str(good.version.number))
                await self._engine.check_draft(good.directory)
                await self._engine.set_speculation(True)
                self.serving, self.fallback = good, None
                return
            except Exception:  # the next rung must be reached whatever this one did
                self.counts["errors"] += 1
                log.exception("draft %s could not be put back", good.version.number)
        self.serving, self.fallback = None, "no good draft"
        await self._engine.set_speculation(False)

    async def _good_drafts(self, exclude: Version | None) -> list[Loaded]:
        drafts = [] if self.serving is None else [self.serving]
        for version in self._state.good:
            known = [*(label(draft.version) for draft in drafts), *([label(exclude)] if exclude else [])]
            if label(version) in known:
                continue
            try:
                directory = await asyncio.to_thread(self._source.fetch, version)
                if self._boot is not None:
                    await asyncio.to_thread(self._source.require_shape, directory, self._boot.directory)
                drafts.append(Loaded(version, directory))
            except (ValueError, OSError) as error:
                log.warning("draft %s can't be fallen back to: %s", version.number, error)
        return drafts

    async def _refuse(self, version: Version, reason: str) -> None:
        """Note that a version is bad; the registry is told now or at a later tick."""
        self.counts["refused"] += 1
        self.postponed.pop(label(version), None)
        self.refused[label(version)] = reason
        self._unreported[label(version)] = reason
        log.warning("draft %s is refused: %s", version.number, reason)
        await self._remember(self._state.with_refused(version, reason))
        await self._report()

    async def _report(self) -> None:
        registry = self._source.registry
        for name, reason in list(self._unreported.items()):
            number = int(name.partition("-")[0])
            try:
                # After a restart the registry may be another one, with another version of this number.
                if label(await asyncio.to_thread(registry.get, "draft", number)) == name:
                    await asyncio.to_thread(registry.revert, "draft", number, reason)
            except NotFound:
                log.warning("draft %s was refused and is gone from the registry", number)
            del self._unreported[name]

    async def _retire(self) -> None:
        """Without a champion the last good draft stays, unless somebody found it bad."""
        if self.serving is None:
            return
        entry = await asyncio.to_thread(self._source.registry.get, "draft", self.serving.version.number)
        if is_quarantined(entry):
            reason = entry.tags["quarantined"]
            self.refused[label(entry)] = reason
            self.serving, self.proof, self.fallback = None, None, f"draft {entry.number} was quarantined"
            await self._engine.set_speculation(False)
            await self._remember(self._state.with_refused(entry, reason))

    async def _remember(self, state: State) -> None:
        self._state = state
        try:
            await asyncio.to_thread(write_state, self._config.state, state)
        except OSError as error:  # a full disk costs the memory of a restart, not the service
            self.counts["errors"] += 1
            log.warning("the state was not written: %s", error)
