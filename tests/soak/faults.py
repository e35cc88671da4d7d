"""What a soak does to a stack. Each fault ends when the stack is whole again, or says that it did not."""

import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain

import httpx

from infra.database import BUSY_TIMEOUT_S
from infra.versions import is_quarantined
from tests.drills.scene import filled
from tests.drills.spoiled import NAN, noisy
from tests.soak.checker import RECOVERY_S, Fault
from tests.soak.stack import SUPERVISOR, Part, Stack

POLL_S = 0.2
# How long a fault beside the service lasts.
LASTS_S = BUSY_TIMEOUT_S + 3.0
NUM_FLAPS = 10
# What its end brings down comes down within this time.
SPREADS_S = 12.0
# More than the tiny recipe's K allows.
BOLD_TAU = 2.9
NUM_SWAPS = 3
# How long nothing else is done for a refresh to begin, learn and be promoted.
LEARNS_S = 200.0
WHY = "the soak says so"

Act = Callable[[], None]


class Faults:
    """Draws faults from a deck that is shuffled anew when it is empty, so that each comes before one comes again."""

    def __init__(
        self, stack: Stack, answered: Counter[str], rng: random.Random, has_small_disk: bool, only: str = ""
    ) -> None:
        """Take how many requests ended how, whether the disk may be filled, and what is in the names of all dealt."""
        self._stack, self._answered, self._rng = stack, answered, rng
        self._has_small_disk, self._only = has_small_disk, only

    def deck(self) -> Iterator[tuple[str, bool, Act]]:
        """Yield what is to be done, whether requests may end with an error meanwhile, and what does it."""
        while True:
            parts = sorted(self._stack.parts())
            kills = [(f"kill {part.kind}", part.serves, self._killing(part)) for part in parts]

            def gone(dealt: list[Part] = parts) -> set[str]:
                """Return the kills of what has ended since, such as a refresh."""
                return {f"kill {part.kind}" for part in dealt if part not in self._stack.parts()}

            swaps = [("swap", False, self._swap)] * NUM_SWAPS
            spoiled = [("draft with NaN", False, self._push_nan), ("draft that boasts", False, self._push_bold)]
            beside = [("alias flaps", False, self._flap), ("query log locked", False, self._lock)]
            full = [("disk full", False, self._fill)] if self._has_small_disk else []
            calm = [("calm until a refresh promotes", False, self._let_learn)]
            cards = [card for card in chain(kills, swaps, spoiled, beside, full, calm) if self._only in card[0]]
            if not cards:
                raise ValueError(f"nothing that is dealt has {self._only!r} in its name")
            self._rng.shuffle(cards)
            yield from (card for card in cards if card[0] not in gone())

    def do(self, what: str, serves: bool, act: Act) -> Fault:
        """Do one, and wait until the stack is whole and requests are answered."""
        began_s = time.monotonic()
        act()
        self._wait(began_s, self._stack.is_whole)
        before = self._answered["ok"]
        self._wait(began_s, lambda: self._answered["ok"] > before + len(self._stack.askers))
        return Fault(what=what, serves=serves, began_s=began_s, ended_s=time.monotonic())

    def _wait(self, began_s: float, holds: Callable[[], bool]) -> None:
        while not holds() and time.monotonic() < began_s + RECOVERY_S:
            time.sleep(POLL_S)

    def _killing(self, part: Part) -> Act:
        def kill() -> None:
            began_s, pids = time.monotonic(), self._stack.parts().get(part, [])
            if not pids:  # such as a refresh that has ended since
                return
            os.kill(self._rng.choice(pids), signal.SIGKILL)
            if part.kind == SUPERVISOR:
                self._stack.up()
            elif part.returns:
                self._wait(began_s, lambda: not {*pids} <= {*self._stack.parts().get(part, [])})
                self._wait(began_s, lambda: len(self._stack.parts().get(part, [])) >= len(pids))
            elif part.serves:
                time.sleep(SPREADS_S)

        return kill

    def _swap(self) -> None:
        self._promote(self._rng.choice(self._others()))

    def _flap(self) -> None:
        for _ in range(NUM_FLAPS):
            self._promote(self._rng.choice(self._others()), wait=False)
            time.sleep(1.0)

    def _others(self) -> list[int]:
        champion = self._stack.registry.champion("draft")
        return [number for number in self._stack.good_drafts() if champion is None or number != champion.number]

    def _promote(self, number: int, wait: bool = True) -> None:
        with suppress(ValueError):  # it was rolled back meanwhile
            self._stack.registry.promote("draft", number, forced=WHY)
        if wait:
            self._wait(time.monotonic(), self._follows)

    def _follows(self) -> bool:
        """Whether the champion of now serves: a refresh or a rollback may have made another one the champion."""
        champion = self._stack.registry.champion("draft")
        return champion is not None and str(self._told("draft_version")) == str(champion.number)

    def _let_learn(self) -> None:
        """Wait for the next draft that a refresh promotes: a run that a fault ends learns nothing."""
        began_s, known = time.monotonic(), {one.number for one in self._stack.registry.versions("draft")}
        while time.monotonic() < began_s + LEARNS_S:
            champion = self._stack.registry.champion("draft")
            if champion is not None and champion.number not in known and champion.lineage.window is not None:
                self._wait(began_s, self._follows)
                return
            time.sleep(POLL_S)

    def _told(self, *names: str) -> object:
        try:
            told: object = self._stack.status()
        except httpx.HTTPError:
            return None
        for name in names:
            told = told[name]  # type: ignore[index]
        return told

    def _push_nan(self) -> None:
        self._push(self._stack.register(NAN, golden_tau=1.0, spoiled=True))

    def _push_bold(self) -> None:
        self._push(self._stack.register(noisy(0.05, seed=0), golden_tau=BOLD_TAU, spoiled=True))

    def _push(self, number: int) -> None:
        registry, began_s = self._stack.registry, time.monotonic()
        registry.promote("draft", number, forced=WHY)
        self._wait(began_s, lambda: is_quarantined(registry.get("draft", number)))
        self._wait(began_s, self._follows)

    def _lock(self) -> None:
        with closing(sqlite3.connect(self._stack.home / "queries.db", timeout=30, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            time.sleep(LASTS_S)
            db.execute("ROLLBACK")
        self._wait_for_rows()

    def _fill(self) -> None:
        with filled(self._stack.home):
            time.sleep(LASTS_S)
        self._wait_for_rows()

    def _wait_for_rows(self) -> None:
        written = self._told("log", "written")
        self._wait(time.monotonic(), lambda: (self._told("log", "written") or 0) > (written or 0))  # type: ignore[operator]
