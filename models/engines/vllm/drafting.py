"""What requests, scheduler and proposer tell each other about drafting. Plain data: importing it imports no vLLM."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from models.lengths import Plan
from models.types import Pace

# A request's wishes, under this name in its sampling parameters' `extra_args`.
WISHES = "redraft"
# A way of drafting that measures what rows and passes cost; the planner's `Turn` says how, step by step. The request's
# domain says how many there are.
MEASURE = "measure"
# Kind of traffic of answers that a grammar constrains, behind a domain and a "/", which no domain's name has.
STRUCTURED = "structured"


class Wishes(NamedTuple):
    """What a request says of its drafting.

    Attributes:
        drafting: a `models.engines.Way`, or MEASURE.
        domain: kind of traffic.
        key: whose recent answers may be looked up, never another's.
        promised: τ at `K` that the draft was promoted for in this domain; 0 if that is not known.
        num_swaps: drafts that had been swapped in before it was asked.
        capture: name under which its hidden states are held for a `capture.Claim`; "" holds none.
        piece: see `models.engines.Sampling`.
    """

    drafting: str = "head"
    domain: str = ""
    key: str = ""
    promised: float = 0.0
    num_swaps: int = 0
    capture: str = ""
    piece: int = 0

    @classmethod
    def of(cls, sampling_params: Any) -> "Wishes":
        """Return what a request's sampling parameters carry."""
        extra = getattr(sampling_params, "extra_args", None) or {}
        if not isinstance(wishes := extra.get(WISHES, cls()), cls):
            wishes = extra[WISHES] = cls(*wishes)  # it travelled as a list, and is asked for several times a step
        return wishes


class Passes(NamedTuple):
    """Passes of the draft over some of a step's sequences; the first writes the draft's keys.

    Attributes:
        num: of the passes; 0 makes the first one all the same, and proposes nothing.
        names: of the sequences; None for all.
    """

    num: int
    names: frozenset[str] | None = None

    def over(self, name: str) -> bool:
        """Whether they are made over a sequence."""
        return self.names is None or name in self.names


class Drafting(NamedTuple):
    """How the rows of one step are drafted; it travels in the place of vLLM's K, `num_spec_tokens_to_schedule`.

    Attributes:
        plan: for the rows that are drafted as is fastest.
        passes: of the draft: the plan's, and K over rows that are drafted by the head alone, each over what needs them.
            A sequence in none of them is left without keys for what the step computes.
        num_looked_up: the most tokens that are looked up for a row; 0 looks nothing up.
        num_filled: sequences that get so many tokens that are as good as any; 0 but while it is measured.
    """

    plan: Plan
    passes: tuple[Passes, ...]
    num_looked_up: int
    num_filled: int = 0

    @property
    def num_passes(self) -> int:
        """The most passes over any row."""
        return max((passes.num for passes in self.passes), default=0)

    @property
    def rests(self) -> bool:
        """Whether not even the pass is made that keeps the draft's keys whole."""
        return not self.passes

    def drafts(self, name: str) -> bool:
        """Whether the draft's keys of a sequence are kept whole."""
        return any(passes.over(name) for passes in self.passes)


class PlannedPace(Pace):
    """What the last plan for served requests expected, at any load; see `models.lengths.Plan`.

    Attributes:
        judging_by_load: share of all tokens that is lost if one of the requests is drafted by the head alone, if 1, 2,
            4, … run.
    """

    judging_by_load: tuple[float, ...] = ()

    def judging_of(self, num_running: int) -> float:
        """Return what is lost for so many requests; 0 as long as nothing tells."""
        lost = self.judging_by_load
        return lost[min(max(num_running - 1, 0).bit_length(), len(lost) - 1)] if lost else 0.0

    def at(self, num_running: int) -> Pace:
        """Return it for so many requests."""
        told = self.model_dump(exclude={"judging", "judging_by_load"})
        return Pace(**told, judging=self.judging_of(num_running))


class Row(NamedTuple):
    """What was drafted for a sequence.

    vLLM hands lists of token ids from the worker to the scheduler; the rest travels before them.

    Attributes:
        match: tokens of the match that look-up found, 0 if none.
        num_found: tokens that followed it.
        looked_up: whether `token_ids` are those; else they are the head's.
    """

    match: int
    num_found: int
    looked_up: bool
    token_ids: list[int]

    def packed(self) -> list[int]:
        """Return the row as it travels."""
        return [self.match, self.num_found, int(self.looked_up), *self.token_ids]

    @classmethod
    def unpacked(cls, travelled: Sequence[int]) -> "Row":
        """Return what `packed` was called on."""
        match, num_found, looked_up, *token_ids = travelled
        return cls(match, num_found, bool(looked_up), token_ids)


NOTHING = Row(0, 0, False, [])
