"""Decide before each step how it is drafted, and learn from what came of the steps before.

The policy (models/lengths) decides; what it decides by is kept here: how much is accepted
(models/core/throughput/running.py) and what steps take (models/core/throughput/cost.py). This runs in the scheduler,
between two steps, so it must take a small part of one. Imports no vLLM.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import ModuleType
from typing import NamedTuple

from models import catalog
from models.core.throughput.cost import Cost, Time, save_cost
from models.core.throughput.running import Acceptance, DomainShare, Source, Speeds
from models.core.throughput.steps import passes_made
from models.engines.vllm.fields import MEASURE, Choice, DraftOptions, Passes, PlannedThroughput, Row, Setup, StepPlan
from models.lengths import Plan, SequenceState
from models.params import BaseParams

# Steps between two times that the table of costs is written: it must only be about right at the next start.
SAVE_EVERY = 2000
# How much of a step goes into the means of prompt tokens and emitted ones: they are of the last hundred steps or so.
PROMPTS_RATE = 0.01
# A step that took so many times as long as expected waited for something else, such as a swap.
LONGEST = 3.0
# Numbers of sequences whose steps are measured, beside the most that the engine runs, and how often each kind of step
# takes its turn. Steps of many sequences vary less and take longer.
NUM_CYCLES = {1: 4, 2: 4, 4: 4, 8: 4, 16: 4, 32: 3, 64: 2, 128: 2}
# Sequences up to which many rows of each are measured; from there on a row takes as long as the one before it.
MANY_ROWS = 16
# Sequences up to which each number of rows is measured that few tokens give: products of few rows have kernels of their
# own (`small_batch_gemm`), so that a row more can take as long as all before it.
FEW_ROWS, FEW_TOKENS = 2, 4
# Numbers of requests for which `MeasurementOverhead` reckons, and steps between two times that it does.
NUMS = (1, 2, 4, 8, 16, 32, 64)
EVERY = 64
# Steps that are planned at once where no request is to be drafted.
LASTS = 8
DEAREST: tuple[Choice, ...] = ("logprobs", "sampled")

log = logging.getLogger(__name__)


class Step(NamedTuple):
    """A step; its `parts` are of domains whose requests are drafted as is fastest, and not to measure acceptance."""

    num_sequences: int
    num_rows: int  # of the target: each sequence's last token and what was verified after it
    ms: float  # from when it began to be scheduled until the next one did: tokens wait for all of that
    parts: dict[str, DomainShare]
    num_read: int = 0  # tokens of prompts that it read, which are no rows
    num_reading: int = 0  # sequences whose prompts they are of


@dataclass
class RequestState:
    """What the scheduler knows of one request in a step; see `models.lengths.SequenceState` for `whole`."""

    draft_options: DraftOptions
    whole: bool
    choice: Choice = "greedy"
    name: str = ""
    num_read: int = 0  # tokens of its prompt that the step reads
    fits: bool = True  # it has not come to the end of the draft's context; else only look-up drafts for it


class Planner:
    """Plans steps.

    Sampling and logprobs take time by the row that greedy decoding does not: with logprobs, choosing the tokens of 16
    sequences took 8 to 30 ms of a step instead of 2 (two cores of an AMD EPYC). So steps in which a sequence asks for
    either have tables of their own, which start as copies of what was measured and learn from the steps served.

    """

    def __init__(self, setup: Setup) -> None:
        """Start from the table of costs that an earlier engine left, if it holds for this one."""
        self.plan: Plan | None = None  # of the last step
        self.drafting = StepPlan(Plan(0), (), 0)  # how the last step is drafted
        self.speeds = Speeds()  # by domain
        self._setup, self._policy = setup, catalog.load("lengths", setup.lengths.name)
        self._acceptance = Acceptance()
        self._measured: list[Time] = []
        self._measuring, self._measured_rows = "", 0  # how many sequences, and how many rows they have together
        self._turn = self._num_swaps = self._num_emitted = self._num_followed = 0
        self._asked: Sequence[RequestState] = ()  # that the last plan was made for
        self._plain: tuple[float, float] | None = None  # ms of a plain step of them, and its doubt, where both tell
        self._promised: set[str] = set()
        self._choice: Choice = "greedy"
        self._overhead = MeasurementOverhead(self._policy, setup.lengths, setup.num_draft_tokens)
        self._read = self._emitted = 0.0
        unknown = Cost(measured_for=setup.measured_for, one_pass=setup.one_pass)
        self._costs: dict[Choice, Cost] = {"greedy": setup.known_cost() or unknown}

    def num_kept(self, draft_options: DraftOptions, whole: bool) -> int:
        """Return how many tokens of the head's proposal are to be verified for a sequence."""
        if draft_options.drafting == "auto":
            return self.drafting.plan.num_kept(draft_options.domain, "head", whole=whole)
        return self._setup.num_draft_tokens if draft_options.drafting == "head" else 0

    @property
    def throughput(self) -> PlannedThroughput | None:
        """What is expected of how requests are served; None before the first that is served so."""
        if (plan := self.plan) is None:
            return None
        return PlannedThroughput(
            num_draft_tokens=plan.settled,
            why=plan.why,
            tokens_per_s=plan.tokens_per_s,
            plain_tokens_per_s=plan.plain_tokens_per_s,
            overhead_by_load=self._overhead.lost,
        )

    def next(self, asked: Sequence[RequestState], is_off: bool = False) -> StepPlan:
        """Return how the sequences of a step are drafted after it; nothing is while speculation `is_off`."""
        setup, draft_options = self._setup, [one.draft_options for one in asked]
        measures = all(wish.drafting == MEASURE for wish in draft_options)
        self._measuring = draft_options[0].domain if draft_options and measures else ""
        if self._measuring:
            self._asked, self._num_followed = (), 1
            return self._measured_step(len(asked), all(one.fits for one in asked))
        num_read = sum(one.num_read for one in asked)
        self._read += PROMPTS_RATE * (num_read - self._read)
        self._emitted += PROMPTS_RATE * (self._num_emitted - self._emitted)
        self._num_emitted = 0
        if asked == self._asked and not num_read and (is_off or self._num_followed < self.drafting.plan.lasts):
            self._num_followed += 1
            self.drafting = self.drafting._replace(num_looked_up=0)
            return self.drafting
        self._asked, num_followed, self._num_followed = asked, self._num_followed, 1
        choices = {one.choice for one in asked}
        self._choice = next((choice for choice in DEAREST if choice in choices), "greedy")
        self._promise(draft_options)
        lookups = {domain: self._acceptance.lookups(domain) for domain in {wish.domain for wish in draft_options}}
        planned = [one for one in asked if one.draft_options.drafting == "auto"]
        drafted = [one for one in planned if one.fits] or planned  # what is only looked up follows the others' plan
        running = [
            SequenceState(one.draft_options.domain, lookups[one.draft_options.domain], one.whole) for one in drafted
        ]
        plan, num_looked_up = Plan(0, skip=True, lasts=LASTS), 0
        if running:
            prompt_tokens = self._read / self._emitted if self._emitted else 0.0
            cost = replace(self._cost, prompt_tokens=prompt_tokens, num_read=num_read)
            most, before = setup.num_draft_tokens, self.plan
            if before is not None and before is self.drafting.plan:
                before = replace(before, followed=num_followed)
            self.plan = plan = self._policy.plan(cost, self._acceptance, running, most, before, setup.lengths)
            num_looked_up = setup.lookup.num_tokens if plan.look_up else 0
            self._overhead.step(cost, self._acceptance, running)
        captures = any(wish.capture for wish in draft_options)
        self.drafting = StepPlan(plan, self._passes(asked, plan), num_looked_up, captures=captures)
        return self.drafting

    def _measured_step(self, num: int, fits: bool) -> StepPlan:
        kinds = turns(num, self._setup.lookup.num_tokens)
        turn = kinds[self._turn % len(kinds)]
        self._turn += 1
        passes = (Passes(self._setup.num_draft_tokens),) if turn.passes and fits else ()
        self._measured_rows = num + self.drafting.num_filled * self.drafting.num_looked_up
        self.drafting = StepPlan(Plan(0, skip=True), passes, turn.num_tokens, turn.num_filled)
        return self.drafting

    def _passes(self, asked: Sequence[RequestState], plan: Plan) -> tuple[Passes, ...]:
        """Return which passes are made: over those that need them, or over all together where that takes no longer."""
        limit, fitting = self._setup.num_draft_tokens, [one for one in asked if one.fits]
        alone = frozenset(one.name for one in fitting if one.draft_options.drafting == "head")
        others = [one for one in fitting if one.name not in alone]
        if plan.settled == 0 and plan.num_passes:  # it explores, and what lacks keys would teach too little
            others = [
                one for one in others if one.whole or plan.num_kept(one.draft_options.domain, "head", whole=False)
            ]
        over = None if len(fitting) == len(asked) else frozenset(one.name for one in fitting)
        together = Passes(limit if alone else plan.num_passes, over)
        apart = [Passes(limit, alone)] if alone else []
        if others and not plan.skip:
            apart.append(Passes(plan.num_passes, frozenset(one.name for one in others)))
        if not apart or any(len(passes.names or ()) == len(fitting) for passes in apart):
            return (together,) if apart else ()
        together_ms, apart_ms = self._passes_ms(together, len(asked)), [self._passes_ms(one, 0) for one in apart]
        return (together,) if together_ms <= sum(apart_ms) else tuple(apart)

    def _passes_ms(self, passes: Passes, num_sequences: int) -> float:
        """Return what passes take; 0 as long as nothing was measured."""
        pass_ms = self._cost.pass_ms(num_sequences if passes.names is None else len(passes.names))
        return passes_made(max(passes.num, 1), self._setup.one_pass) * (pass_ms or 0.0)

    def verified(self, draft_options: DraftOptions, row: Row, num_accepted: int, whole: bool) -> None:
        """Take what was accepted of a row; `whole` says whether the sequence has all of the draft's keys."""
        self._num_emitted += num_accepted + 1
        source: Source = "lookup" if row.looked_up else "head"
        num_drafted = len(row.token_ids)
        if num_drafted and draft_options.drafting != MEASURE:
            num_accepted = min(num_accepted, num_drafted)
            told = (row.match, whole, row.num_wanted, row.chances)
            self._acceptance.see(draft_options.domain, source, num_drafted, num_accepted, *told)

    def looked_up(self, draft_options: DraftOptions, row: Row) -> None:
        """Take what look-up found for a sequence."""
        if draft_options.drafting == "auto" and self.drafting.num_looked_up:
            self._acceptance.see_lookup(draft_options.domain, row.match, row.num_found)

    def took(self, step: Step, rows: Iterable[Row] | None) -> None:
        """Take a step; `rows` were drafted after it, None where nothing was."""
        num_passes, num_drafted, made = 0, 0, self.drafting.passes
        if rows is not None and made:
            most = max((len(row.token_ids) for row in rows if not row.looked_up), default=0)
            num_passes = passes_made(max(1, most), self._setup.one_pass)
            num_drafted = min(len(made[0].names or ()), step.num_sequences)  # fewer where one was taken back meanwhile
        if self._measuring:
            # Not while the first come or the last have gone, nor the step after, which verifies what fewer were given.
            if (
                str(step.num_sequences) == self._measuring
                and not step.num_read
                and step.num_rows == self._measured_rows
            ):
                # No token need be kept of them.
                num_passes = passes_made(self.drafting.num_passes, self._setup.one_pass)
                self._measured.append(Time(step.num_sequences, step.num_rows, num_passes, step.ms))
            return
        measured, self._measured = self._measured, []
        if any(one.num_passes == 0 for one in measured):  # else it broke off at once, and the steps served must tell
            self._take(measured)
        if self._num_followed > 2:  # what the second step of a plan tells holds for those after it
            if self._plain is not None:
                plain, doubt = self._plain
                self.speeds.see(step.parts, min(step.ms, LONGEST * plain), plain, plain, doubt)
            return
        cost, self._plain = self._cost, None
        # Not the first: making a plan that lasts takes its time. Nor do two kinds of passes that share it tell.
        tells = self._num_followed == min(self.drafting.plan.lasts, 2) and (len(made) < 2 or num_passes == 0)
        if tells and not step.num_read:
            cost = cost.after(Time(step.num_sequences, step.num_rows, num_passes, step.ms, num_drafted))
            self._costs[self._choice] = cost
            if cost.num_steps % SAVE_EVERY == 0:
                self._save(self._choice)
        plain_ms = cost.step_ms(step.num_sequences, step.num_sequences, 0)
        expected_ms = cost.step_ms(step.num_sequences, max(step.num_rows, step.num_sequences), num_passes)
        if plain_ms is None or expected_ms is None or (rows is None and not self.drafting.rests):
            return  # speculation is off, or nothing tells
        doubt, ms, undrafted_ms = cost.doubt(step.num_sequences), min(step.ms, LONGEST * expected_ms), plain_ms
        self._plain = (plain_ms, doubt)
        if step.num_read:
            ms, undrafted_ms = step.ms, _undrafted_ms(cost, step, num_passes)
        self.speeds.see(step.parts, ms, undrafted_ms, plain_ms, doubt)

    def _take(self, times: Sequence[Time]) -> None:
        """Begin with what was measured, and keep it unless the machine was busy with something else."""
        cost = replace(Cost.measured(times, self._setup.measured_for), one_pass=self._setup.one_pass)
        self._costs = {"greedy": cost}
        self._overhead.expire()
        if cost.doubted:
            log.warning("what steps take varied by %.0f%%: it is measured anew at the next start", 100 * cost.noise)
        else:
            self._save("greedy")

    def _promise(self, draft_options: Iterable[DraftOptions]) -> None:
        """Start anew where another draft was swapped in, with what it promises in the domains that ask."""
        for wish in draft_options:
            if wish.num_swaps > self._num_swaps:
                self._num_swaps = wish.num_swaps
                self._promised.clear()
                self.speeds = Speeds()
                self._overhead.expire()
                self._acceptance.start({})
            # A request that was asked before the swap tells of the draft before.
            if wish.promised and wish.num_swaps == self._num_swaps and wish.domain not in self._promised:
                self._promised.add(wish.domain)
                self._acceptance.promise(wish.domain, _chances(wish.promised, self._setup.num_draft_tokens))

    @property
    def _cost(self) -> Cost:
        if self._choice not in self._costs:
            self._costs[self._choice] = self._setup.known_cost(self._choice) or self._costs["greedy"]
        return self._costs[self._choice]

    def _save(self, choice: Choice) -> None:
        file, cost = self._setup.file(choice), self._costs[choice]
        if file is None or cost.doubted:
            return
        try:
            save_cost(cost, file)
        except OSError as error:  # in the engine's step: a full disk costs the next start its table, not this engine
            log.warning("the table of costs was not written: %s", error)


class MeasurementOverhead:
    """Estimates now and then what it costs to measure acceptance by a request that is drafted head-only.

    It does so for more requests than run and for fewer, since they come and go faster.
    """

    def __init__(self, policy: ModuleType, params: BaseParams, limit: int) -> None:
        """Say by which policy the others are drafted, with which parameters and up to how many tokens (K)."""
        self.lost: tuple[float, ...] = ()  # share of the tokens of all, for each of NUMS; empty before the first time
        self._policy, self._params, self._limit = policy, params, limit
        self._due_in = 0  # steps

    def expire(self) -> None:
        """Reckon anew at the next step: the draft is another, or what steps take was measured."""
        self._due_in = 0

    def step(self, cost: Cost, acceptance: Acceptance, running: Sequence[SequenceState]) -> None:
        """Take a step of requests that the policy drafts for; costs as much as `NUMS` plans when it is due."""
        self._due_in -= 1
        if self._due_in < 0:
            self.lost = tuple(self._lost(cost, acceptance, list(islice(cycle(running), num))) for num in NUMS)
            self._due_in = EVERY

    def _lost(self, cost: Cost, acceptance: Acceptance, running: Sequence[SequenceState]) -> float:
        """Return what is lost if one of the sequences measures acceptance: 0 as long as too little was measured."""
        limit, num = self._limit, len(running)
        line, one_ms = cost.line(num), cost.pass_ms(1)
        if line is None or line.pass_ms is None or one_ms is None:
            return 0.0
        plan: Plan = self._policy.plan(cost, acceptance, running, limit, None, self._params)
        if not plan.tokens_per_s:
            return 0.0
        more, num_passes = limit - plan.settled, 1 if cost.one_pass else limit
        passes_ms = min(num_passes * one_ms, line.passes_ms(limit) - line.passes_ms(plan.settled))
        more_ms = passes_ms + line.target_ms(num + more) - line.target_ms(num)
        more_ms += 0.0 if plan.settled else line.prompt_ms  # else prompts are read in any case
        a_ms, step_ms = plan.tokens_per_s / 1000, line.target_ms(num) + line.passes_ms(plan.settled)
        gained = min(
            acceptance.expected(domain, "head", limit) - acceptance.expected(domain, "head", plan.settled)
            for domain in {one.domain for one in running}
        )
        return max(0.0, (a_ms * more_ms - gained) / (a_ms * step_ms))


class MeasuredStep(NamedTuple):
    """What a step does that measures: what it drafts is verified, or filled up, in the next one."""

    passes: bool = False  # makes K passes of the draft, of which nothing is verified
    num_filled: int = 0  # sequences that the next step verifies tokens of
    num_tokens: int = 0  # of each of them


def turns(num_sequences: int, num_tokens: int) -> list[MeasuredStep]:
    """Return the kinds of steps that take turns while it is measured, so that all meet what else the machine does.

    The first has passes and one row a sequence, the second neither more; then come steps with more rows. The first rows
    beyond one a sequence are the dearest: 4 beside 16 took 12 ms, and 16 26 (two cores of an AMD EPYC).
    """
    turn, few = [MeasuredStep(passes=True)], num_sequences // 4
    turn += [MeasuredStep(num_filled=few, num_tokens=1)] if few else []
    many = max(1, num_tokens) if num_sequences <= MANY_ROWS else 1
    some = range(1, min(many, FEW_TOKENS) + 1) if num_sequences <= FEW_ROWS else ()
    return [*turn, *(MeasuredStep(False, num_sequences, num) for num in sorted({1, *some, many})), MeasuredStep()]


def cycles(most: int) -> dict[int, int]:
    """Return the numbers of sequences that an engine is measured with which runs so many at most, and their cycles."""
    most = min(most, max(NUM_CYCLES))
    fewer = {num: num_cycles for num, num_cycles in NUM_CYCLES.items() if num < most}
    return fewer | {most: next(num_cycles for num, num_cycles in NUM_CYCLES.items() if num >= most)}


def _undrafted_ms(cost: Cost, step: Step, num_passes: int) -> float:
    """Return what a step that read prompts would have taken without a draft: prompts take their time in any case."""
    num = step.num_sequences
    line = replace(cost, num_read=step.num_read).line(num)
    if line is None or line.pass_ms is None:
        return step.ms
    more = step.num_rows - (num - step.num_reading)
    drafted_ms = line.target_ms(num + more) - line.target_ms(num) + line.passes_ms(num_passes)
    return max(step.ms - drafted_ms - (line.read_ms if num_passes else 0.0), line.target_ms(num))


def _chances(tau: float, num_tokens: int) -> list[float]:
    """Return the shares of steps in which each place is accepted, if a place is accepted as often as the one before it.

    τ = 1 + Σ_{i ≤ K} a^i, solved for a by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        a = (low + high) / 2
        low, high = (a, high) if 1 + sum(a**place for place in range(1, num_tokens + 1)) < tau else (low, a)
    return [low**place for place in range(1, num_tokens + 1)]
