"""Keeps for the trigger which domains fell short of what the champion was promoted for, and which did not.

A replica of ours counts what it serves; of somebody else's servers the rows of the query log tell.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from infra.events import ACCEPTANCE_FELL, Emitter
from infra.triggerfile import TriggerFile, now_ms
from infra.triggers import Fallen, Fell, Recovered
from infra.versions import Version
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.drift_detector import DriftDetector, Params, Standing
from services.drafts import label

log = logging.getLogger(__name__)


class DriftWatch:
    """Tests the domains of the champion, and tells the trigger and the operator.

    More requests should be tested of the domains that are `doubted`; `last` is the number of the last one heard of.
    """

    def __init__(self, params: Params, querylog: Path, events: Emitter) -> None:
        self.doubted, self.last = frozenset[str](), -1
        self._params, self._trigger, self._events = params, TriggerFile(querylog), events
        self._detector, self._followed, self._draft = DriftDetector({}, params), "", 0

    def follow(self, version: Version) -> bool:
        """Test what this draft serves from now on; return whether it was another one before."""
        if self._followed == label(version):
            return False
        self._detector = DriftDetector(version.lineage.tau, self._params)
        self._followed, self._draft = label(version), version.number
        return True

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
        except (sqlite3.Error, OSError, ValueError) as error:
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
