"""How much is accepted just now, by domain and by what drafts, and how fast requests are answered: running estimates.

a_j is the chance of the token at place j once all before it were accepted. Look-up has its own by how many tokens had
matched, and the head for sequences that lack keys because it rested while they ran.

    a_j = (accepted + w · before) / (reached + w)

over the steps that reached place j, each counting less by 1 / memory with every later one. `before` is what the gate
saw of a draft that has just been swapped in. A domain that it did not see begins like all others, but no lower than a
first guess, else it would never be tried. The weight w falls to 0 as steps come in. A second, short mean stands beside
each: where the two differ by more than chance allows, the traffic has changed, and what is older is forgotten at once.

How fast requests of a domain are answered, and how fast they would be without any draft, follows from times of steps:

    tokens/s = Σ tokens / Σ (sequences · ms of the step)
    without:   Σ tokens / Σ (sequences · ms of the step without a draft + spared · ms of a plain step)

of one request, over steps of all kinds; `spared` tokens came with others in one step, and without a draft each takes a
plain step. What a plain step of as many sequences takes is the table's (`models.core.throughput.cost`), which plain
steps keep current. The interval is of the quotient of the two sums: how much it varies from batch to batch of steps,
and how well the table knows its plain steps. Steps of one request are alike, so single ones would tell too little.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, NamedTuple

from models.core.throughput.certainty import Certainty
from models.types import MIN_STEPS, Speed

Source = Literal["head", "lookup"]

MATCHES = (4, 8)  # a look-up that matched fewer than 4 tokens is of class 0, fewer than 8 of class 1, else of class 2
LACKING = 0.5  # of what the head would be accepted, before any was seen of a sequence that lacks keys
FIRST_GUESS = {("head", 0): 0.5, ("head", 1): 0.5 * LACKING, ("lookup", 0): 0.4, ("lookup", 1): 0.6, ("lookup", 2): 0.8}
GUESS_WEIGHT = 10.0  # steps that a first guess counts for, before any was seen
GATE_WEIGHT = 50.0  # of what the gate saw
FADED = 200.0  # steps after which neither counts
NUM_PLACES = 16  # those after it are taken for it
SHORT_MEMORY = 50.0
CHANGED = 4.0  # standard deviations
LEAST_VARIANCE = 0.01
LEAST_CHANCE = 0.01  # of a look-up that is planned with
MAX_DOMAINS = 64  # the others are one
OTHERS = ""
MEMORY = 1000.0  # steps of a domain after which a step counts for 1/e
BATCH = 32  # steps: about as many as a request has
LEAST_BATCHES = MIN_STEPS // BATCH  # before that nothing is told


class Lookup(NamedTuple):
    """What look-up is expected to propose for a sequence: the chance is 1 where it is there already."""

    chance: float
    match: int
    num_tokens: int


class _Place:
    __slots__ = ("accepted", "reached", "short")

    def __init__(self) -> None:
        self.accepted = self.reached = self.short = 0.0

    def chance(self, before: float, before_weight: float) -> float:
        weight = max(before_weight * (1 - self.reached / FADED), 0.0)
        return (self.accepted + weight * before) / (self.reached + weight)

    def see(self, accepted: bool, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.reached = reached = self.reached * keep + 1
        self.short += (accepted - self.short) / min(reached, SHORT_MEMORY)
        if reached > 2 * SHORT_MEMORY:
            known = self.accepted / reached
            # The short mean's variance is that of 2 × memory steps.
            variance = max(known * (1 - known), LEAST_VARIANCE) / (2 * SHORT_MEMORY)
            if (self.short - known) ** 2 > CHANGED**2 * variance:
                self.accepted, self.reached = SHORT_MEMORY * self.short, SHORT_MEMORY


class Acceptance:
    """The estimates; changed in place, since every verified proposal is shown to them.

    Attributes:
        num_swaps: how often `start` was called.
    """

    def __init__(self, memory: int = 1000) -> None:
        """Know nothing yet; after `memory` steps a step counts for 1/e."""
        self._keep = 1 - 1 / memory
        self._places: dict[tuple[str, Source, int], list[_Place]] = defaultdict(_places)
        self._pooled: dict[tuple[Source, int], list[_Place]] = defaultdict(_places)
        self._before: dict[str, list[float]] = {}
        self._domains: set[str] = set()
        self._looked_up: dict[str, list[list[float]]] = {}  # by class: how often, tokens that matched, tokens proposed
        self._made: dict[str, list[_Place]] = defaultdict(_places)  # of the head's chains: those that came to a place
        self._certainty: dict[str, Certainty] = defaultdict(Certainty)
        self.num_swaps = 0

    def start(self, accepted: Mapping[str, Sequence[float]]) -> None:
        """Begin anew for a draft that was just swapped in; what is known of look-up stays.

        `accepted` is the share of steps in which the token at each place was accepted
        (`acceptance.Summary.per_position`), by domain, as the gate saw it; may be empty. ValueError if a share is not
        from 0 to 1.
        """
        self._before = {}
        for domain, shares in accepted.items():
            self.promise(domain, shares)
        self._places = defaultdict(_places, {key: one for key, one in self._places.items() if key[1] != "head"})
        self._pooled = defaultdict(_places, {key: one for key, one in self._pooled.items() if key[0] != "head"})
        self._made.clear()
        self._certainty.clear()
        self.num_swaps += 1

    def promise(self, domain: str, accepted: Sequence[float]) -> None:
        """Learn what the gate saw of the draft in one more domain; ValueError if a share is not from 0 to 1."""
        if not accepted or not all(0 <= share <= 1 for share in accepted):
            raise ValueError(f'domain "{domain}": wanted shares from 0 to 1, got {list(accepted)}')
        self._before[domain] = [min(share / last, 1.0) if last else 0.0 for last, share in pairwise([1.0, *accepted])]

    def see(
        self,
        domain: str,
        source: Source,
        num_drafted: int,
        num_accepted: int,
        match: int = 0,
        whole: bool = True,
        num_wanted: int = 0,
        chances: Sequence[float] = (),
    ) -> None:
        """Take in one verified proposal; of one with no drafted tokens there is nothing to see.

        `match` is how many tokens had matched, of look-up, and `whole` whether the head has all keys of the sequence.
        The head's chain may have ended before the tokens that were wanted: it emits no more where it does, so that what
        was not drafted counts as not accepted. `chances` are its own of each drafted token. ValueError if more was
        accepted than drafted, or less than nothing.
        """
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"wanted accepted tokens from 0 to the {num_drafted} drafted, got {num_accepted}")
        key = self._known(domain), source, kind_of(source, match, whole)
        own, pooled = self._places[key], self._pooled[key[1:]]
        num_wanted = max(num_wanted, num_drafted)
        for place in range(min(num_accepted + 1, num_wanted, NUM_PLACES)):
            accepted = place < num_accepted
            own[place].see(accepted, self._keep)
            pooled[place].see(accepted, self._keep)
        if source == "head":
            for place in range(1, min(num_drafted + 1, num_wanted, NUM_PLACES)):
                self._made[key[0]][place].see(num_drafted > place, self._keep)
            if chances:
                self._certainty[key[0]].see(chances[:num_drafted], num_accepted)

    def made(self, domain: str, num_tokens: int) -> list[float]:
        """Return how many of the head's chains come to each of so many tokens and don't end before; empty if all do."""
        places = self._made.get(self._known(domain))
        if places is None:
            return []
        shares = (places[min(place, NUM_PLACES - 1)].chance(1.0, GUESS_WEIGHT) for place in range(1, num_tokens))
        return list(accumulate([1.0, *shares], mul))[:num_tokens]

    def least(self, domain: str, worth: float) -> float:
        """Return the head's own chance below which a chain is ended; `worth` is what another token has to give.

        That is in tokens; see `models.core.throughput.certainty`.
        """
        first = self.chances(domain, "head", 1)[0]
        certainty = self._certainty.get(self._known(domain))
        return (certainty or Certainty()).least(worth / first) if first > 0 else 1.0

    def chances(self, domain: str, source: Source, num_tokens: int, match: int = 0, whole: bool = True) -> list[float]:
        """Return a_1 … a_num_tokens."""
        kind = kind_of(source, match, whole)
        own = self._places.get((self._known(domain), source, kind))
        weight = GATE_WEIGHT if source == "head" and whole and domain in self._before else GUESS_WEIGHT
        before = [self._chance_before(domain, source, kind, place) for place in range(min(num_tokens, NUM_PLACES))]
        found = before if own is None else [own[place].chance(one, weight) for place, one in enumerate(before)]
        return found + found[-1:] * (num_tokens - len(found))

    def expected(self, domain: str, source: Source, num_tokens: int, match: int = 0) -> float:
        """Return how many of so many drafted tokens are accepted: Σ_i Π_{j ≤ i} a_j."""
        return sum(accumulate(self.chances(domain, source, num_tokens, match), mul), 0.0)

    def see_lookup(self, domain: str, match: int, num_tokens: int) -> None:
        """Take in one try of look-up: how many tokens matched and how many it had to propose, 0 if none."""
        kinds = self._looked_up.setdefault(self._known(domain), [[0.0, 0.0, 0.0] for _ in range(len(MATCHES) + 1)])
        hit = match_class(match) if num_tokens else -1
        for kind, means in enumerate(kinds):
            means[0] += ((kind == hit) - means[0]) / SHORT_MEMORY
        if num_tokens:
            means, rate = kinds[hit], 1.0 if not kinds[hit][2] else 1 / SHORT_MEMORY
            means[1] += rate * (match - means[1])
            means[2] += rate * (num_tokens - means[2])

    def lookups(self, domain: str) -> tuple[Lookup, ...]:
        """Return what look-up is expected to propose in this domain; the chances add up to at most 1."""
        kinds = self._looked_up.get(self._known(domain), [])
        return tuple(
            Lookup(round(chance, 3), round(match), max(round(num_tokens), 1))
            for chance, match, num_tokens in kinds
            if chance >= LEAST_CHANCE
        )

    def _known(self, domain: str) -> str:
        """Return a domain's name, or the one for all that came after the first 64."""
        if len(self._domains) < MAX_DOMAINS:
            self._domains.add(domain)
        return domain if domain in self._domains else OTHERS

    def _chance_before(self, domain: str, source: Source, kind: int, place: int) -> float:
        """Return a_j as far as it is known from before this domain was seen; what is not drafted is never known."""
        if source == "head" and kind:
            return LACKING * self.chances(domain, source, place + 1)[place]
        if source == "head" and domain in self._before:
            chances = self._before[domain]
            return chances[min(place, len(chances) - 1)]
        guess, pooled = FIRST_GUESS[source, kind], self._pooled.get((source, kind))
        if source == "head" and self._before:  # what the gate saw in other domains
            seen = [chances[min(place, len(chances) - 1)] for chances in self._before.values()]
            guess = sum(seen) / len(seen)
        return guess if pooled is None else max(guess, pooled[place].chance(guess, GUESS_WEIGHT))


def _places() -> list[_Place]:
    return [_Place() for _ in range(NUM_PLACES)]


def kind_of(source: Source, match: int, whole: bool) -> int:
    """Return what an estimate is told apart by, within a domain and a source."""
    return match_class(match) if source == "lookup" else int(not whole)


def match_class(match: int) -> int:
    """Return the class of a look-up that matched so many tokens; a longer match is accepted more often."""
    return bisect_right(MATCHES, match)


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
