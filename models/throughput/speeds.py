"""How fast requests of each domain are decoded, and how fast they would be without any draft, from the times of steps.

    tokens/s = Σ tokens / Σ (sequences · ms of the step)        without: Σ tokens / Σ (tokens · ms of a plain step)

of one request, over the steps that read no prompt, each counting less by 1 / memory with every later one of its domain.
What a plain step of as many sequences takes is the table's (`models.throughput.cost`), which plain steps keep current.
"""

from typing import NamedTuple

MEMORY = 1000.0  # steps of a domain after which a step counts for 1/e
MAX_DOMAINS = 64  # the others are one
OTHERS = ""


class Speed(NamedTuple):
    """Tokens a second of one request, as it is drafted and without any draft."""

    tokens_per_s: float
    plain_tokens_per_s: float


class Part(NamedTuple):
    """What a step had of one domain: sequences, and tokens that they emitted."""

    num_sequences: int
    num_tokens: int


class Speeds:
    """Running means by domain; changed in place, since every step is shown to them."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._sums: dict[str, tuple[float, float, float]] = {}  # tokens, ms that they took, ms of plain steps

    def see(self, parts: dict[str, Part], step_ms: float, plain_ms: float) -> None:
        """Take in one step.

        Args:
            parts: by domain.
            step_ms: that it took.
            plain_ms: that a step of as many sequences takes without any draft.
        """
        keep = 1 - 1 / MEMORY
        for domain, part in parts.items():
            name = domain if domain in self._sums or len(self._sums) < MAX_DOMAINS else OTHERS
            tokens, ms, plain = self._sums.get(name, (0.0, 0.0, 0.0))
            self._sums[name] = (
                tokens * keep + part.num_tokens,
                ms * keep + part.num_sequences * step_ms,
                plain * keep + part.num_tokens * plain_ms,
            )

    def of(self, domain: str) -> Speed | None:
        """Return a domain's speed; None before its first step."""
        name = domain if domain in self._sums or len(self._sums) < MAX_DOMAINS else OTHERS
        tokens, ms, plain = self._sums.get(name, (0.0, 0.0, 0.0))
        return Speed(1000 * tokens / ms, 1000 * tokens / plain) if tokens else None
