"""How the drafts of attached servers do by what the servers' own metrics count, without a recorder.

A server counts what was drafted and accepted of all traffic (`vllm:spec_decode_*`), and tells neither requests nor
domains apart. So a stretch of a server's counts, a window, stands in the place of a request where the drift detector
tests; it has MIN_STEPS steps, so that it is over many requests and what still runs at its ends weighs little. All
traffic together is held against the least that the draft promised of a domain that it knows: what falls below that has
fallen, whatever the traffic is made of, while a fall in one domain may hide behind others. Two drafts can't be compared
so, because they never served the same requests (tasks/post_promotion_test.py).
"""

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

from infra.consent import OTHER_DOMAINS
from infra.rollouts import DraftCounts
from models.core.evaluation.acceptance import AcceptanceCount
from models.core.evaluation.drift_detector import is_low

MIN_STEPS = 512
MAX_WINDOWS = 4096


def read_counts(server: str, since: Mapping[str, Any]) -> DraftCounts:
    """Return what a server's plugin tells of its draft since it serves; ValueError if it keeps no metrics."""
    if "drafts" not in since:
        raise ValueError(
            f"{server} keeps no metrics; start it without --disable-log-stats, or leave out --read-metrics"
        )
    places = itertools.takewhile(lambda name: name in since, (f"accepted_{place}" for place in itertools.count()))
    return DraftCounts(
        steps=int(since["drafts"]),
        drafted=int(since["drafted"]),
        accepted=int(since["accepted"]),
        per_position=tuple(int(since[name]) for name in places),
    )


def promised_of_all(promised: Mapping[str, float]) -> dict[str, float]:
    """Return the τ that all traffic together has at least if no domain fell that the draft knows."""
    known = [tau for domain, tau in promised.items() if not is_low(domain, promised)]
    return {OTHER_DOMAINS: min(known)} if known else {}


class MetricWindows:
    """The windows of all servers that a process follows, the oldest first."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[int, DraftCounts]] = {}
        self._windows = deque[tuple[int, AcceptanceCount]](maxlen=MAX_WINDOWS)
        self._numbers = itertools.count()

    def take(self, server: str, draft: int, counts: DraftCounts) -> None:
        """Hear what a server counted of the draft, by its number, that it has now."""
        of, begun = self._begun.setdefault(server, (draft, counts))
        steps = counts.steps - begun.steps
        if of == draft and 0 <= steps < MIN_STEPS:
            return
        self._begun[server] = (draft, counts)
        if of == draft and steps > 0:
            drafted, accepted = counts.drafted - begun.drafted, counts.accepted - begun.accepted
            one = AcceptanceCount(next(self._numbers), OTHER_DOMAINS, steps, drafted, accepted)
            self._windows.append((draft, one))

    def begin_anew(self, server: str) -> None:
        """Leave out what a server counted since its last window: it was asked for something else than traffic."""
        self._begun.pop(server, None)

    def of(self, draft: int, after: int) -> list[AcceptanceCount]:
        """Return the windows of a draft behind the one of a number."""
        return [one for of, one in self._windows if of == draft and one.number > after]
