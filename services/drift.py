"""Keeps for the trigger which domains fell short of what the champion was promoted for, and draws what that is told by.

A replica of ours that is alone counts what it serves. Of several, one tells for all by the rows of the query log; of
somebody else's servers these tell, or their metrics.

Where look-up takes the easy tokens and the number of drafted ones follows load and cost, what is accepted says little
of the draft. So a few requests are drafted head-only and up to K, as the gate scored it, and the trigger, the canaries
and the report read those alone: the first of each draft and domain, then fewer, down to a fixed share, or four times as
many while acceptance seems to have fallen and that is not told yet (models/core/evaluation/drift_detector.py). Nobody
who asks can know which. Where such a request costs the others tokens, fewer are drawn.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from infra.events import ACCEPTANCE_FELL, Emitter
from infra.querylog import QueryLog
from infra.trigger_store import TriggerStore, now_ms
from infra.triggers import Fallen, Fell, Recovered
from infra.versions import Version, label
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.drift_detector import DOUBTED, FIRST, SHARE, DriftDetector, Params, Standing, share_alone

LOST = 0.005  # share of the tokens that drawn requests may cost
NUM_COUNTED = 4096  # rows of the log that say how the champion does, at one look
MAX_COUNTED = 1024  # pairs of draft and domain; names of domains come from clients

log = logging.getLogger(__name__)


class AcceptanceSampler:
    def __init__(self) -> None:
        self._seen, self._random = Counter[tuple[str, str]](), random.SystemRandom()

    def draws(self, draft_version: str, domain: str, doubted: bool = False, lost: float = 0.0) -> bool:
        """Return whether the next request of a domain is drafted by this draft alone.

        `lost` is the share of the tokens that it would cost to draft all running requests so; in doubt four times
        `LOST` may be lost.
        """
        pair = (draft_version, domain)
        if pair not in self._seen and len(self._seen) >= MAX_COUNTED:
            self._seen.clear()
        self._seen[pair] += 1
        number = self._seen[pair]
        chance = float(share_alone(np.array(number), np.array(doubted)))
        if lost and number > FIRST:
            chance = min(chance, LOST / lost * (DOUBTED / SHARE if doubted else 1))
        return self._random.random() < chance


class DriftWatch:
    """Tests the domains of the champion, and tells the trigger and the operator.

    More requests should be tested of the domains that are `doubted`; `last` is the number of the last one heard of.
    """

    def __init__(self, params: Params, querylog: Path | str, events: Emitter) -> None:
        self.doubted, self.last = frozenset[str](), -1
        self._params, self._trigger, self._events = params, TriggerStore(querylog), events
        self._detector, self._followed, self._draft = DriftDetector({}, params), "", 0

    def follow(self, version: Version, promised: Mapping[str, float] | None = None) -> bool:
        """Test what this draft serves from now on; return whether it was another one before.

        `promised` is τ by domain, by default what its gate measured.
        """
        if is_new := self._followed != label(version):
            self._detector = DriftDetector(version.lineage.tau if promised is None else promised, self._params)
            self._followed, self._draft = label(version), version.number
        return is_new

    async def hear(self, counts: Sequence[AcceptanceCount]) -> None:
        """Take the requests since the last look, oldest first, and tell what follows from all of them.

        It is told anew at every look, so nothing is lost if the file can't be written now.
        """
        if counts:
            self._detector.take(counts)
            self.last = counts[-1].number
        self.doubted = self._detector.doubted()
        events = {domain: _event(self._draft, standing) for domain, standing in self._detector.standings().items()}
        try:
            changed = await asyncio.to_thread(self._trigger.tell, events)
        except (OSError, ValueError) as error:
            log.warning("the trigger's state can't be written: %s", error)
            return
        for domain, now in changed.items():
            if isinstance(now, Fallen):
                figures = now.fall.model_dump(include={"draft", "promised", "served"})
                self._events.emit(ACCEPTANCE_FELL, domain, figures)


def _event(draft: int, standing: Standing) -> Fell | Recovered:
    if not standing.fallen:
        return Recovered()
    return Fell(draft=draft, promised=standing.promised, served=standing.served, now_ms=now_ms())


def counts_of(
    querylog: Path | str, draft: int, after_seq: int, num_rows: int = NUM_COUNTED, server: str | None = None
) -> list[AcceptanceCount]:
    """Return what rows say of a draft that name the server which answered them, or of one server those of its name."""
    journal = QueryLog(querylog)
    try:
        return [AcceptanceCount(*one) for one in journal.acceptance_counts(draft, after_seq, num_rows, server)]
    finally:
        journal.close()
