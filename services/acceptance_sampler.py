"""Which requests are drafted head-only and up to K, so that acceptance can be measured.

Where look-up takes the easy tokens and the number of drafted ones follows load and cost, what is accepted says little
of the draft. So a few requests are drafted as the gate scored it, and the trigger, the canaries and the report read
those alone: the first ones of each draft and domain, then fewer and fewer, down to a fixed share, or four times as many
while acceptance seems to have fallen and that is not told yet (models/core/evaluation/drift_detector.py). Nobody who
asks can know which. Where such a request costs the others tokens, fewer are drawn.
"""

import random
from collections import Counter

import numpy as np

from models.core.evaluation.drift_detector import DOUBTED, FIRST, SHARE, share_alone

LOST = 0.005  # share of the tokens that it may cost
MAX_COUNTED = 1024  # pairs of draft and domain; names of domains come from clients


class AcceptanceSampler:
    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()
        self._random = random.SystemRandom()

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
