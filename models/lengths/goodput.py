"""Draft as many tokens as give the most emitted ones a second, none where plain decoding gives more.

    goodput(k) = Σ_sequences (1 + Σ_{i ≤ k} Π_{j ≤ i} a_j) / T(sequences, rows, passes)

with a_j from `models.core.throughput.running` and T from `models.core.throughput.cost`. The paper verifies the same
number of tokens of each sequence; here look-up and head, and domains that the draft knows and such that it does not,
are cut at different lengths in one step, see `models.core.throughput.steps`.

- The k of a step is kept until another promises `margin` more. Plain decoding need only promise as much, so that
  nothing is lost for the sake of being steady.
- At 0 the draft still makes one pass a step, which keeps its keys, for as long as that has taken no more than
  `rest_after` of a step. Then it rests: at once where many prompts come and none is to be drafted for. At rest a plan
  lasts until look-up is asked again, so that planning hardly takes time either.
- What is not drafted can't be learned. So `explore` of the time buys steps that are drafted otherwise: each pays the ms
  that it would lose if nothing more were accepted for it. Half of it is spent as it comes, half is put by for the time
  after a swap or a change of load. Where nothing pays, only sequences whose keys are whole are drafted for, since those
  that lack some accept too little to learn from: at rest they are those whose prompt is read in a step, and then the
  next steps are drafted, until 32 proposals were seen.
- A chain ends early where the draft is too unsure of it (`models.core.throughput.certainty`); what is expected of a
  step counts the rows and passes that chains come to.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import mul
from typing import Literal, NamedTuple

from pydantic import Field

from models.core.throughput.cost import Cost
from models.core.throughput.running import FIRST_GUESS, NUM_PLACES, Acceptance, Source, match_class
from models.core.throughput.steps import Group, Line, Option, Price, everything, option_of, options_of
from models.lengths import Plan, SequenceState, View
from models.params import BaseParams

PAPER = "arXiv:2406.14066, section 4"
PLANS = ("margin", "rest_after", "end_early")

RECENT = 32  # steps of a sequence that drafted, which its estimate rests on
DWELL = 16  # steps between two changes of k, unless load or draft changed
RESTED = 1.5  # of the margin: what it must promise to begin again after a rest
EAGER = 500  # steps after a swap or a change of load in which what was put by is spent
STRETCH = 32  # proposals that are explored in a row from rest
GUESS_WEIGHT = 4  # steps that the first guess counts for with a single sequence
LOOK_EVERY = 8  # steps at rest, where nothing that is looked up pays
PUT_BY = 4  # steps' time that is put by at most, or as much as the next stretch takes


class Params(BaseParams):
    """When to change.

    Attributes:
        margin: share of goodput that another number of tokens must promise to be taken.
        explore: share of the time that may be lost for learning.
        end_early: whether a chain ends where the draft, as far as it is right in such cases, is too unsure of it for
            another pass to pay; a chain of an EAGLE-3 head on a CPU does.
        rest_after: what the draft may take at 0 to keep its keys, in steps without a draft; then it makes no pass.
    """

    name: Literal["goodput"] = "goodput"
    margin: float = Field(0.01, ge=0)
    explore: float = Field(0.005, ge=0, lt=1)
    rest_after: float = Field(0.5, ge=0)
    end_early: bool = True


class _Memory(NamedTuple):
    """What a plan leaves to the next one."""

    since: int = 0  # steps since k changed
    quiet: int = 0  # steps since a swap or a change of load
    load: int = 0  # class of the number of sequences
    num_swaps: int = 0  # that `Acceptance` had seen
    price: Price | None = None  # of the step before
    budget: float = 0.0  # ms that may be lost for learning
    put_by: float = 0.0  # the same, for later
    explored: int = 0  # how often something was, a stretch counting once
    gap: int = 0  # steps since then
    stretch: int = 0  # steps of a stretch that are still to come
    kept_ms: float = 0.0  # that keeping the keys has taken since the last proposal; infinity once it rests


class _Try(NamedTuple):
    """A way to draft that teaches something."""

    num_passes: int
    longest: dict[tuple[str, Source, int], int]
    lost_ms: float  # of each step, if nothing more is accepted for it
    num_steps: int = 1  # in a row
    possible: bool = True  # there is a sequence to learn from
    read_ms: float = 0.0  # that the first of them takes to read prompts

    @property
    def total_ms(self) -> float:
        return self.num_steps * self.lost_ms + self.read_ms


def num_draft_tokens(view: View, params: Params) -> int:
    """Return the number of tokens with the highest goodput, as if all running sequences drafted as this one does.

    Its last 32 steps that drafted are looked at; as long as the cost of a step is unknown, it is the limit. `explore`
    sets how often a token is drafted where none pays; nothing is kept steady.
    """
    num, cost = view.num_running, view.cost
    times = [cost.step_ms(num, num * view.num_rows(length), length) for length in range(view.limit + 1)]
    known = [ms for ms in times if ms is not None]
    if len(known) < len(times):
        return view.limit
    goodputs, tokens, chance = [1 / known[0]], 1.0, 1.0
    for place in range(view.limit):
        chance *= _recent_chance(view, place)
        tokens += chance
        goodputs.append(tokens / known[place + 1])
    best = max(range(view.limit + 1), key=goodputs.__getitem__)
    if best or not view.limit or not params.explore:
        return best
    lost = known[1] / known[0] - 1  # if nothing of it is accepted
    wait = math.ceil(round(lost / params.explore, 6))
    return int(len(view.steps) >= wait and not any(drafted for drafted, _ in islice(reversed(view.steps), wait)))


def plan(
    cost: Cost,
    acceptance: Acceptance,
    running: Sequence[SequenceState],
    limit: int,
    before: Plan | None,
    params: Params,
) -> Plan:
    """Choose how a step drafts; as long as the cost can't tell, the limit is. A look-up is as long as it is worth.
    ValueError if no sequence runs."""
    if not running:
        raise ValueError("wanted sequences to plan for, got none")
    num = len(running)
    line = cost.line(num)
    if line is None or line.pass_ms is None:
        return Plan(limit, settled=limit)
    groups = _groups(acceptance, running, limit)
    before = before or Plan(0)
    memory: _Memory = before.memory or _Memory()
    options, price = options_of(line, groups, limit, memory.price)
    num_whole, lasting = sum(sequence.whole for sequence in running), options
    if 0 < num_whole < num:  # those that lack keys end, so the number of passes is chosen as if none did
        whole = [sequence._replace(whole=True) for sequence in running]
        lasting, _ = options_of(line, _groups(acceptance, whole, limit), limit, memory.price)
    settled = _settle(lasting, before.settled if before.memory else 0, num, acceptance, memory, params)
    memory = _later(memory, settled != before.settled, num, acceptance, options[settled].ms, params, before.followed)
    kept_ms = 0.0 if settled else memory.kept_ms + line.passes_ms(1) + line.read_ms
    idle = kept_ms > params.rest_after * line.target_ms(num)
    memory = memory._replace(kept_ms=math.inf if idle else kept_ms)
    explores, longest, passes = False, options[settled].longest, settled
    if limit and params.explore:
        tried = _try(line, groups, options, settled, idle, num_whole, memory.explored)
        explores, memory = _explore(tried, options[settled].ms, memory)
        if explores:
            longest, passes = tried.longest, tried.num_passes
    skip = idle and passes == 0
    asks = not idle or any(longest[key] for key in longest if key[1] == "lookup")
    return Plan(
        num_passes=passes,
        skip=skip,
        longest=longest,
        look_up=asks or memory.since % LOOK_EVERY == 0,
        settled=settled,
        tokens_per_s=1000 * options[settled].goodput,
        plain_tokens_per_s=1000 * num / line.target_ms(num),
        why="explores" if explores else "pays" if options[settled].rows > num else "loses",
        memory=memory._replace(price=price),
        stops=_stops(acceptance, groups, line, price) if params.end_early and passes > 1 else {},
        lasts=LOOK_EVERY - memory.since % LOOK_EVERY if skip and not asks else 1,
    )


def _groups(acceptance: Acceptance, running: Sequence[SequenceState], limit: int) -> list[Group]:
    groups = []
    alike = Counter((sequence.domain, sequence.lookups, sequence.whole) for sequence in running)
    for (domain, lookups, whole), num in alike.items():
        head = list(accumulate(acceptance.chances(domain, "head", limit, whole=whole), mul))
        found = [
            (
                one,
                match_class(one.match),
                list(accumulate(acceptance.chances(domain, "lookup", NUM_PLACES, one.match), mul)),
            )
            for one in lookups
        ]
        groups.append(Group(num, domain, whole, head, found, acceptance.made(domain, limit)))
    return groups


def _stops(acceptance: Acceptance, groups: Sequence[Group], line: Line, price: Price) -> dict[str, float]:
    """Return where chains end: a row more is each one's own, and a pass is shared by all that go on."""
    num = line.num_sequences
    row_ms = line.target_ms(price.rows + 1) - line.target_ms(price.rows)
    worth = price.goodput * (row_ms + (line.pass_ms or 0.0) / num)
    return {group.domain: acceptance.least(group.domain, worth) for group in groups}


def _settle(
    options: Sequence[Option], settled: int, num: int, acceptance: Acceptance, memory: _Memory, params: Params
) -> int:
    """Return the number of passes that is kept until another is better by the margin."""
    settled = min(settled, len(options) - 1)
    if memory.since < DWELL and not _changed(num, acceptance, memory):
        return settled
    best = max(range(len(options)), key=lambda passes: options[passes].goodput)
    if options[best].goodput == options[settled].goodput:
        return best  # the fewest; more tokens of one pass than are worth their rows change nothing
    needed = (1 + params.margin * (RESTED if math.isinf(memory.kept_ms) else 1)) * options[settled].goodput
    if options[best].goodput > needed:
        return best
    return settled if options[settled].goodput > options[0].goodput else 0


def _later(
    memory: _Memory,
    moved: bool,
    num: int,
    acceptance: Acceptance,
    step_ms: float,
    params: Params,
    num_steps: int,
) -> _Memory:
    """Return the memory so many steps later, with their share of the time earned."""
    earned = num_steps * params.explore / 2 * step_ms
    return memory._replace(
        since=0 if moved else memory.since + num_steps,
        quiet=0 if _changed(num, acceptance, memory) else memory.quiet + num_steps,
        load=num.bit_length(),
        num_swaps=acceptance.num_swaps,
        budget=memory.budget + earned,
        put_by=min(memory.put_by + earned, PUT_BY * step_ms),
        gap=memory.gap + num_steps,
    )


def _explore(tried: _Try, step_ms: float, memory: _Memory) -> tuple[bool, _Memory]:
    """Return whether it is this step's turn to learn, and the memory after it has paid."""
    if not tried.possible:
        return False, memory._replace(stretch=0)
    most = max(PUT_BY * step_ms, tried.total_ms)
    memory = memory._replace(budget=min(memory.budget, most))
    if memory.stretch == 0:
        eager = memory.quiet < EAGER
        available = memory.budget + (memory.put_by if eager else 0.0)
        if memory.gap < DWELL or available < tried.total_ms:
            return False, memory
        if eager:
            memory = memory._replace(budget=available, put_by=0.0)
        memory = memory._replace(stretch=tried.num_steps, budget=memory.budget - tried.read_ms)
    # A stretch is cut short where another number of tokens pays now.
    stretch = min(memory.stretch, tried.num_steps) - 1
    memory = memory._replace(budget=memory.budget - tried.lost_ms, stretch=stretch)
    if stretch == 0:
        memory = memory._replace(explored=memory.explored + 1, gap=0)
    return True, memory


def _try(
    line: Line, groups: Sequence[Group], options: Sequence[Option], settled: int, idle: bool, num_whole: int, turn: int
) -> _Try:
    """Return what is to be learned from next, and what it costs if nothing more is accepted for it.

    Where a draft pays, a plain step, whose time counts as well, and the limit take turns. Where none does, the best
    number of passes and the limit, for sequences whose keys are whole, and look-up.
    """
    limit, chosen = len(options) - 1, options[settled]
    if settled and turn % 2 == 0:
        # What a plain step emits, the settled one would have emitted in part of its time.
        lost = options[0].ms + (line.pass_ms or 0.0) - options[0].tokens / chosen.goodput
        return _Try(0, options[0].longest, max(lost, 0.0))
    if settled or (turn % 2 and any(group.lookups for group in groups)):
        passes = limit if settled else 0
        option = option_of(line, groups, passes, everything(groups, passes))
        return _Try(passes, option.longest, max(option.ms - chosen.ms, 0.0))
    passes = limit if turn % 4 >= 2 else max(range(1, limit + 1), key=lambda passes: options[passes].goodput)
    longest = chosen.longest | {key: passes for key in chosen.longest if key[1:] == ("head", 0)}
    lost = max(line.step_ms(chosen.rows + num_whole * passes, passes) - chosen.ms, 0.0)
    num_steps = -(-STRETCH // num_whole) if idle and num_whole else 1
    return _Try(passes, longest, lost, num_steps, num_whole > 0, line.read_ms if idle else 0.0)


def _changed(num: int, acceptance: Acceptance, memory: _Memory) -> bool:
    return num.bit_length() != memory.load or acceptance.num_swaps != memory.num_swaps


def _recent_chance(view: View, place: int) -> float:
    """Return a_{place + 1} of one sequence, over its last 32 steps that drafted so far."""
    recent = islice((step for step in reversed(view.steps) if step[0]), RECENT)
    reached = [accepted > place for drafted, accepted in recent if drafted > place and accepted >= place]
    return (sum(reached) + GUESS_WEIGHT * FIRST_GUESS["head", 0]) / (len(reached) + GUESS_WEIGHT)
