"""A served batch in which the truth is known: what steps take, and how often each token is accepted.

Steps are those of vLLM: what one drafts, the next verifies. Answers end and others begin; an answer that runs while the
draft rests lacks keys, and from then on half as much of its tokens is accepted.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import Acceptance
from models.lengths import Plan, SequenceState, goodput

LIMIT = 3
BAD, FRESH, ADAPTED = (0.05, 0.05, 0.05), (0.3, 0.2, 0.15), (0.6, 0.55, 0.5)
WITHOUT_KEYS = 0.5
MEASURED_AT = (1, 2, 4, 8, 16, 32, 64)


class Machine(NamedTuple):
    """What steps take: rows up to `cheap_rows` cost little, those beyond them are compute-bound."""

    name: str
    base_ms: float
    cheap_rows: int
    cheap_ms: float
    row_ms: float
    pass_ms: float

    def target_ms(self, rows: int) -> float:
        return (
            self.base_ms
            + self.cheap_ms * min(rows - 1, self.cheap_rows)
            + self.row_ms * max(rows - 1 - self.cheap_rows, 0)
        )

    def step_ms(self, num_sequences: int, rows: int, passes: int) -> float:
        return self.target_ms(rows) + passes * (self.pass_ms + 0.05 * (num_sequences - 1))

    def measure(self, rng: np.random.Generator) -> Cost:
        """Return the table as it is measured at a start, each step nine times."""
        shapes = [(num, num * rows, 0) for num in MEASURED_AT for rows in (1, 2, 4)]
        shapes += [(num, num, 1) for num in MEASURED_AT] + [(num, 2 * num, 2) for num in MEASURED_AT]
        times = [Time(*shape, self.step_ms(*shape) * rng.lognormal(0, 0.05)) for shape in shapes for _ in range(9)]
        return Cost.measured(times, self.name)


# Compiled, two cores of an AMD EPYC, profiled at 16 sequences: plain 19 ms, 28 with a token of the head each, 36 with
# two, 42 with three; a pass is cheap there, rows are not.
WITH_UNITS = Machine("bfloat16 units", 11.4, 0, 0.0, 0.5, 0.9)
WITHOUT = Machine("compute-bound", 40.0, 0, 0.0, 4.5, 3.5)


class Answer(NamedTuple):
    """One sequence: its domain, how much easier than others it is to draft for, and what has been drafted for it."""

    domain: str
    ease: float
    left: int
    keys: bool = True
    drafted: int = 0


@dataclass
class Served:
    """A batch and its controller, step by step.

    Attributes:
        drafts: domain to a_1, a_2, …
        slowness: of the machine just now.
    """

    machine: Machine
    drafts: dict[str, tuple[float, ...]]
    rng: np.random.Generator
    spread: float = 0.0
    slowness: float = 1.0
    params: goodput.Params = field(default_factory=goodput.Params)

    def __post_init__(self) -> None:
        self.cost, self.acceptance = self.machine.measure(self.rng), Acceptance()
        self.plan: Plan | None = None
        self.whole: list[bool] = []  # whether each answer had all keys when it was made
        self.followed = 0
        self.answers: list[Answer] = []
        self.plans: list[Plan] = []
        self.emitted: list[int] = []
        self.ms: list[float] = []
        self.plain_ms: list[float] = []  # that plain decoding takes for the tokens emitted

    def run(self, num_steps: int, load: int) -> None:
        """Serve so many sequences at once."""
        for _ in range(num_steps):
            self.step(load)

    def step(self, load: int) -> None:
        """Plan unless the last plan lasts, verify what the last step drafted, draft."""
        rng, domains = self.rng, list(self.drafts)
        answers = self.answers[:load]
        new = [
            Answer(domains[rng.integers(len(domains))], rng.lognormal(0, self.spread), 1 + int(rng.exponential(100)))
            for _ in range(load - len(answers))
        ]
        running = [SequenceState(one.domain, whole=one.keys) for one in [*answers, *new]]
        whole, before = [one.whole for one in running], self.plan
        if before is None or new or whole != self.whole or self.followed >= before.lasts:
            before = before and replace(before, followed=self.followed)
            self.plan = goodput.plan(self.cost, self.acceptance, running, LIMIT, before, self.params)
            self.whole, self.followed = whole, 0
        self.followed += 1
        assert self.plan is not None
        plan, rows = self.plan, len(new)
        emitted, served = len(new), []
        for one in answers:
            accepted = self._accepted(one)
            rows += 1 + one.drafted
            emitted += 1 + accepted
            if one.drafted:
                self.acceptance.see(one.domain, "head", one.drafted, accepted, whole=one.keys)
            served.append(one._replace(left=one.left - 1 - accepted))
        passes = 0 if plan.skip else max(plan.num_passes, 1)
        expected = self.machine.step_ms(load, rows, passes) * self.slowness
        ms = expected * rng.lognormal(0, 0.05)
        if rng.random() < 0.002:
            ms += 100
        if not new and self.followed == min(plan.lasts, 2):
            self.cost = self.cost.after(Time(load, rows, passes, ms))
        self.answers = [
            self._drafted(one._replace(keys=one.keys and not plan.skip)) for one in (*served, *new) if one.left > 0
        ]
        self.plans.append(plan)
        self.emitted.append(emitted)
        self.ms.append(expected)
        self.plain_ms.append(self.machine.step_ms(load, load, 0) * self.slowness / load * emitted)

    def swap(self, draft: tuple[float, ...], promised: tuple[float, ...]) -> None:
        """Draft with another draft, of which the gate saw what is promised."""
        self.drafts = dict.fromkeys(self.drafts, draft)
        self.acceptance.start(dict.fromkeys(self.drafts, np.cumprod(promised).tolist()))

    def gain(self, start: int = 0, end: int | None = None) -> float:
        """Return by how much plain decoding would take longer for the same tokens."""
        return sum(self.plain_ms[start:end]) / sum(self.ms[start:end])

    def changes(self, start: int = 0) -> int:
        """Return how often another number of tokens was settled on."""
        settled = [plan.settled for plan in self.plans[start:]]
        return sum(left != right for left, right in pairwise(settled))

    def _drafted(self, one: Answer) -> Answer:
        plan = self.plan
        assert plan is not None
        return one._replace(drafted=min(plan.num_passes, plan.num_kept(one.domain, "head", whole=one.keys)))

    def _accepted(self, one: Answer) -> int:
        for place in range(one.drafted):
            chance = self.drafts[one.domain][place] * one.ease * (1.0 if one.keys else WITHOUT_KEYS)
            if self.rng.random() >= chance:
                return place
        return one.drafted


def best_fixed(machine: Machine, draft: tuple[float, ...], load: int) -> float:
    """Return the gain of the fixed length that is best, 0 included."""
    plain_ms = machine.step_ms(load, load, 0)
    return max(
        (1 + float(np.cumprod(draft[:length]).sum())) * plain_ms / machine.step_ms(load, load * (1 + length), length)
        for length in range(LIMIT + 1)
    )
