"""What travels inside vLLM's fields between the process that answers, the scheduler and the workers.

| of vLLM's | carries | from | to |
|---|---|---|---|
| `SamplingParams.extra_args[OPTIONS]` | `DraftOptions` | `tap` | scheduler and proposer |
| `VllmConfig.additional_config` | `Setup`, or `WithParent` alone | engine | scheduler and workers |
| `SchedulerOutput.num_spec_tokens_to_schedule`, vLLM's K | `StepPlan` | scheduler | proposer |
| `DraftTokenIds.draft_token_ids` | `Row`s, packed | proposer | scheduler |
| `EngineCoreOutput.kv_transfer_params`, the only open field | STEP, THROUGHPUT, SPEED | scheduler | `patches.outputs` |
| `RequestOutput.kv_transfer_params` | TOLD | `patches.outputs` | `tap`, which takes it out again |
| `Request.__dict__` | ROW, DRAFTED, GAPS | scheduler | itself, a step later |
| `GPUModelRunner.__dict__` | NUM_READ | `patches.last_tap` | `patches.proposer` |
| `SamplingMetadata.generators` | `patches.sampling.Noise` | `patches.sampling` | itself, within a step |

Plain data: importing it imports no vLLM.
"""

import ctypes
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from models.core.throughput.cost import Cost, load_cost
from models.engines import LookUp
from models.lengths import Plan
from models.params import BaseParams
from models.types import ThroughputEstimate

# A request's wishes.
OPTIONS = "redraft"
# Of an output: the step that it comes from, and what the planner expects.
STEP, THROUGHPUT, SPEED = "redraft_step", "redraft_throughput", "redraft_speed"
# All that the scheduler told of a request so far, and its steps in that.
TOLD, STEPS = "redraft_told", "redraft_steps"
# Of a request: what was drafted for it last, whether anything drafted for it at all after its last step, and whether a
# position lacks draft keys.
ROW, DRAFTED, GAPS = "redraft_row", "redraft_drafted", "redraft_gaps"
# Of a runner: how many residual streams the draft reads, where the target hands out one more.
NUM_READ = "redraft_num_read"
# A way of drafting that measures what rows and passes cost; the planner's `MeasuredStep` says how, step by step. The
# request's domain says how many there are.
MEASURE = "measure"
# In place of the chance below which a chain ends, where chances tell nothing.
UNTOLD = -1.0
# Kind of traffic of answers that a grammar constrains, behind a domain and a "/", which no domain's name has.
STRUCTURED = "structured"
# How a request's tokens are chosen, as far as that takes time.
Choice = Literal["greedy", "sampled", "logprobs"]
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class DraftOptions(NamedTuple):
    """What a request says of its drafting."""

    drafting: str = "head"  # a `models.engines.Way`, or MEASURE
    domain: str = ""
    key: str = ""  # whose recent answers may be looked up, never another's
    promised: float = 0.0  # τ at K that the draft was promoted for in this domain; 0 if that is not known
    num_swaps: int = 0  # drafts that had been swapped in before it was asked
    capture: str = ""  # name under which its hidden states are held for a `capture.Claim`; "" holds none
    piece: int = 0  # see `models.engines.Sampling`

    @classmethod
    def of(cls, sampling_params: Any) -> "DraftOptions":
        """Return what a request's sampling parameters carry."""
        extra = getattr(sampling_params, "extra_args", None) or {}
        draft_options = extra.get(OPTIONS, cls())
        if not isinstance(draft_options, cls):  # it travelled as a list, and is asked for several times a step
            draft_options = extra[OPTIONS] = cls(*draft_options)
        return draft_options


class Passes(NamedTuple):
    """Passes of the draft over some of a step's sequences; the first writes the draft's keys."""

    num: int  # 0 makes the first one all the same, and proposes nothing
    names: frozenset[str] | None = None  # of the sequences; None for all

    def over(self, name: str) -> bool:
        """Whether they are made over a sequence."""
        return self.names is None or name in self.names


class StepPlan(NamedTuple):
    """How the rows of one step are drafted; it travels in the place of vLLM's K, `num_spec_tokens_to_schedule`.

    Passes are the plan's, and K over rows that are drafted head-only, each over what needs them. A sequence in
    none of them is left without keys for what the step computes.
    """

    plan: Plan  # for the rows that are drafted as is fastest
    passes: tuple[Passes, ...]
    num_looked_up: int  # the most tokens that are looked up for a row
    num_filled: int = 0  # sequences that get so many tokens that are as good as any; 0 but while it is measured
    captures: bool = False  # hidden states of some of them are held

    @property
    def num_passes(self) -> int:
        """The most passes over any row."""
        return max((passes.num for passes in self.passes), default=0)

    @property
    def rests(self) -> bool:
        """Whether not even the pass is made that keeps the draft's keys whole."""
        return not self.passes

    @property
    def is_plain(self) -> bool:
        """Whether nothing after the step needs what the target computed."""
        return self.rests and not self.captures

    def drafts(self, name: str) -> bool:
        """Whether the draft's keys of a sequence are kept whole."""
        return any(passes.over(name) for passes in self.passes)


class PlannedThroughput(ThroughputEstimate):
    """What the last plan for served requests expected, at any load; see `models.lengths.Plan`."""

    overhead_by_load: tuple[float, ...] = ()  # share of all tokens lost if one of 1, 2, 4, … is drafted head-only

    def overhead_of(self, num_running: int) -> float:
        """Return what is lost for so many requests; 0 as long as nothing tells."""
        lost = self.overhead_by_load
        return lost[min(max(num_running - 1, 0).bit_length(), len(lost) - 1)] if lost else 0.0

    def at(self, num_running: int) -> ThroughputEstimate:
        """Return it for so many requests."""
        told = self.model_dump(exclude={"measurement_overhead", "overhead_by_load"})
        return ThroughputEstimate(**told, measurement_overhead=self.overhead_of(num_running))


class Row(NamedTuple):
    """What was drafted for a sequence.

    vLLM hands lists of token ids from the worker to the scheduler; the rest travels before them.
    """

    match: int  # tokens of the match that look-up found, 0 if none
    num_found: int  # tokens that followed it
    looked_up: bool  # whether `token_ids` are those; else they are the head's
    token_ids: list[int]
    num_wanted: int = 0  # of the head, which may have ended its chain before
    chances: Sequence[float] = ()  # the head's own, to the thousandth, that its tokens up to each are right

    def of_head(self, token_ids: Sequence[int], num_wanted: int, chances: Sequence[float]) -> "Row":
        """Return the row with the tokens that the head drafted of those wanted; -1 stands where it drafted none."""
        drafted = [token for token in token_ids[:num_wanted] if token >= 0]
        return self._replace(token_ids=drafted, num_wanted=num_wanted, chances=chances[: len(drafted)])

    def cut(self, num: int) -> "Row":
        """Return the row with so many tokens at most, as if no more had been wanted."""
        if num >= len(self.token_ids):
            return self
        return self._replace(token_ids=self.token_ids[:num], num_wanted=min(self.num_wanted, num))

    def packed(self) -> list[int]:
        """Return the row as it travels."""
        told = (len(self.chances), *(round(1000 * chance) for chance in self.chances))
        return [self.match, self.num_found, int(self.looked_up), self.num_wanted, *told, *self.token_ids]

    @classmethod
    def unpacked(cls, travelled: Sequence[int]) -> "Row":
        """Return what `packed` was called on."""
        match, num_found, looked_up, num_wanted, num_told, *rest = travelled
        chances = tuple(told / 1000 for told in rest[:num_told])
        return cls(match, num_found, bool(looked_up), rest[num_told:], num_wanted, chances)


NOTHING = Row(0, 0, False, [])


class WithParent:
    """What an engine's process unpickles with its configuration, before it does anything: it ends with its parent.

    vLLM's own ends with its parent once it serves. While it starts, it notices nothing, and waits five minutes for a
    parent that was killed before it first answered.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Come out of a pickle as a call, in the process that reads it."""
        return _arrive, (os.getpid(),)

    def __deepcopy__(self, _: dict[int, Any]) -> "WithParent":
        """Return itself: a copy does not leave its process."""
        return self

    def compute_hash(self) -> str:
        """Return what vLLM names compiled code by: nothing of this is compiled."""
        return ""


@dataclass(frozen=True)
class Setup:
    """What the scheduler is to know."""

    num_draft_tokens: int  # K, the most passes of the draft
    lookup: LookUp
    lengths: BaseParams  # the policy
    costs: Path | None = None  # where the table of what steps take is kept; None keeps it in memory
    measured_for: str = ""  # what its times hold for
    captures: bool = False  # the target's last residual stream is to be had, see `patches.last_tap`
    one_pass: bool = False  # the draft says all of its tokens in one pass
    guard: WithParent = field(default_factory=WithParent)  # ends the engine's process with its parent

    def compute_hash(self) -> str:
        """Return what vLLM names compiled code by: which streams the target hands out is compiled."""
        return "captures" if self.captures else ""

    def known_cost(self, choice: Choice = "greedy") -> Cost | None:
        """Return the table that an earlier engine left; None if there is none that holds for this one."""
        file = self.file(choice)
        if file is None or not file.exists():
            return None
        try:
            return replace(load_cost(file, self.measured_for), one_pass=self.one_pass)
        except ValueError as error:
            log.warning("what steps take is measured anew: %s", error)
            return None

    def file(self, choice: Choice) -> Path | None:
        """Return where the table of steps that choose so is kept."""
        if self.costs is None or choice == "greedy":
            return self.costs
        return self.costs.with_stem(f"{self.costs.stem}-{choice}")


def end_with(parent: int) -> None:
    """Let the kernel kill this process once its parent is gone, at once if `parent` is not its parent any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def _arrive(sender: int) -> WithParent:
    # Whoever gets it from another process than its parent, such as over a network, has nothing to end with.
    if sender != os.getpid() and (sender == os.getppid() or not Path(f"/proc/{sender}").exists()):
        end_with(sender)
    return WithParent()
