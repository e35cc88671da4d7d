"""How fast requests of each domain are answered, and how fast they would be without any draft, from the times of steps.

    tokens/s = Σ tokens / Σ (sequences · ms of the step)
    without:   Σ tokens / Σ (sequences · ms of the step without a draft + spared · ms of a plain step)

of one request, over steps of all kinds; `spared` tokens came with others in one step, and without a draft each takes a
plain step. Each step counts less by 1 / memory with every later one of its domain. What a plain step of as many
sequences takes is the table's (`models.core.throughput.cost`), which plain steps keep current.

The interval is of the quotient of the two sums: how much it varies from batch to batch of steps, and how well the table
knows its plain steps. Steps of one request are alike, so single ones would tell too little of it.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from models.core.throughput.running import MAX_DOMAINS, OTHERS
from models.types import MIN_STEPS, Speed

MEMORY = 1000.0  # steps of a domain after which a step counts for 1/e
BATCH = 32  # steps: about as many as a request has
LEAST_BATCHES = MIN_STEPS // BATCH  # before that nothing is told


class DomainShare(NamedTuple):
    """What a step had of one domain: sequences, tokens that they emitted, of these all but each one's first, and of how
    many sequences it verified drafted tokens."""

    num_sequences: int
    num_tokens: int
    num_spared: int
    num_drafted: int = 0


@dataclass
class _Sums:
    """Of a domain: fading sums over steps, and over batches of them."""

    tokens: float = 0.0
    ms: float = 0.0
    plain: float = 0.0
    doubted: float = 0.0  # plain · its relative error
    sequences: float = 0.0
    drafted: float = 0.0  # those of them that drafted tokens were verified of
    seen: int = 0  # batches
    num: float = 0.0  # the same, fading
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # over batches: ms², ms · plain, plain²
    batch: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # steps, ms, plain

    def see(self, part: DomainShare, ms: float, plain: float, doubt: float) -> None:
        keep = 1 - 1 / MEMORY
        self.tokens, self.ms = self.tokens * keep + part.num_tokens, self.ms * keep + ms
        self.sequences = self.sequences * keep + part.num_sequences
        self.drafted = self.drafted * keep + part.num_drafted
        self.plain, self.doubted = self.plain * keep + plain, self.doubted * keep + plain * doubt
        self.batch = [self.batch[0] + 1, self.batch[1] + ms, self.batch[2] + plain]
        if self.batch[0] == BATCH:
            _, ms, plain = self.batch
            new = (ms * ms, ms * plain, plain * plain)
            self.squares = [keep ** (2 * BATCH) * old + one for old, one in zip(self.squares, new, strict=True)]
            self.num, self.seen, self.batch = 1 + self.num * keep**BATCH, self.seen + 1, [0.0, 0.0, 0.0]

    def error(self) -> float:
        """Return the standard error of the logarithm of plain / ms."""
        gain, (ms2, both, plain2) = self.plain / self.ms, self.squares
        left = max(plain2 - 2 * gain * both + gain * gain * ms2, 0.0) / self.plain**2
        return math.sqrt(left * self.num / (self.num - 1) + (self.doubted / self.plain) ** 2)


class Speeds:
    """Running means by domain; changed in place, since every step is shown to them."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def see(
        self, parts: dict[str, DomainShare], step_ms: float, undrafted_ms: float, plain_ms: float, doubt: float
    ) -> None:
        """Take in one step, of parts by domain.

        It took `step_ms` and would have taken `undrafted_ms` without any draft; a step of as many sequences that reads
        no prompt and is not drafted takes `plain_ms`, known with the relative standard error `doubt`.
        """
        for domain, part in parts.items():
            sums = self._sums.setdefault(self._name(domain), _Sums())
            undrafted = part.num_sequences * undrafted_ms + part.num_spared * plain_ms
            sums.see(part, part.num_sequences * step_ms, undrafted, doubt)

    def of(self, domain: str) -> Speed | None:
        """Return a domain's speed; None as long as too few steps tell."""
        sums = self._sums.get(self._name(domain))
        if sums is None or sums.seen < LEAST_BATCHES or not sums.tokens:
            return None
        gain, by = sums.plain / sums.ms, math.exp((2 + 3 / sums.num) * sums.error())  # about Student's t
        return Speed(
            tokens_per_s=1000 * sums.tokens / sums.ms,
            plain_tokens_per_s=1000 * sums.tokens / sums.plain,
            low=gain / by,
            high=gain * by,
            drafted=sums.drafted / sums.sequences,
        )

    def _name(self, domain: str) -> str:
        return domain if domain in self._sums or len(self._sums) < MAX_DOMAINS else OTHERS
