"""Length policies: how many tokens to draft next.

A policy's module has

- `num_draft_tokens(view, params) -> int`: asked before each step of one sequence, how many tokens it may draft at most,
  from 0, a plain step, to `view.limit`;
- `go_on(view, params) -> bool`, only in policies that want it: asked after each pass of the draft but the step's last,
  whether it is to draft on. `view` is the one from before the step, with the step's `confidences`;
- `OVERLAPS`, only in policies whose tokens are drafted while the target reads;
- `estimate(logits, index, place, params) -> float`, only in policies with `go_on` that judge by themselves how likely
  the last drafted token is to be accepted: it stands in `confidences` in place of what the draft says of itself;
- `fit(draft, target_dir, samples, num_draft_tokens, work_dir, params, seed) -> Params`, only in policies that learn:
  make them for a draft, which stays as it is, from greedy answers of its target, best such as it was not trained on;
- `plan(cost, acceptance, running, limit, before, params) -> Plan`, only in policies that can serve: asked before each
  step of a batch, for all of its sequences, or less often where a plan `lasts`. `before` is the last plan, None at
  first, and all that a policy remembers; `cost` (`models.core.throughput.cost`) and `acceptance`
  (`models.core.throughput.running`) are kept by who asks, and are shown the steps that read no prompt, of those that
  follow a plan one, and every proposal that was verified, of sequences whose draft keys are whole. `PLANS` are the keys
  that it alone reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from models.core.throughput.cost import Cost
from models.core.throughput.running import Lookup, Source, kind_of

Why = Literal["pays", "loses", "explores", "unmeasured", "fixed"]


@dataclass(frozen=True)
class View:
    """What a policy knows of one sequence and of the engine.

    `confidences` are `models.drafts.confidence`, or the policy's `estimate`.
    """

    limit: int  # K, the most tokens that the engine drafts in a step
    steps: tuple[tuple[int, int], ...]  # (drafted, accepted) tokens of each of its verification steps so far
    num_running: int  # sequences that the engine serves now, this one included
    cost: Cost  # what steps take
    confidences: tuple[float, ...] = ()  # of each pass of the draft in this step, from 0 to 1
    vectors: tuple[
        int, ...
    ] = ()  # rows of its own that the draft has read beside 0 tokens, beside one …; empty if none

    def num_rows(self, num_tokens: int) -> int:
        return 1 + num_tokens + (self.vectors[num_tokens] if self.vectors else 0)


def all_tokens(view: View, params: Any) -> int:
    """Return the limit: nothing else decides before a step."""
    return view.limit


class SequenceState(NamedTuple):
    """One sequence of a batch that decodes.

    Attributes:
        lookups: what look-up proposes for it: one with chance 1 if that is known, else what is likely; none is the
            head's turn, and so is what is left of the chances.
        whole: the draft has, or gets in this step, the keys of all its positions; not if a step skipped them, and then
            the head's proposals are accepted less often.
    """

    domain: str
    lookups: tuple[Lookup, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Plan:
    """How a step of a batch drafts.

    Attributes:
        num_passes: of the draft, as many as tokens that the head proposes a sequence, from 0 to the limit; a draft that
            says them all in one pass makes one.
        skip: not even the pass is made that keeps the draft's keys whole, because 0 is expected to last. Sequences that
            run meanwhile lack keys, and accept less when drafting goes on.
        longest: (domain, source, kind, see `models.core.throughput.running.kind_of`) to the most tokens of such a
            proposal that are worth verifying; 0 of a look-up: the head's proposal is worth more.
        look_up: look-up is asked, if only to know what it finds; once, where the plan lasts.
        settled: `num_passes` without the steps that only explore.
        tokens_per_s: expected, of what is settled.
        plain_tokens_per_s: expected without any draft.
        why: "explores" drafts otherwise than it pays, to learn; "unmeasured" as long as `cost` can't tell;
            "fixed" looks at neither.
        memory: the policy's own.
        stops: domain to the draft's own chance of a chain's tokens below which it drafts none after them.
        lasts: steps that it may be followed for, as long as the same sequences run and none of them reads its prompt.
        followed: steps that it was, as whoever asks for the next one says.
    """

    num_passes: int
    skip: bool = False
    longest: Mapping[tuple[str, Source, int], int] = field(default_factory=dict)
    look_up: bool = True
    settled: int = 0
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0
    why: Why = "unmeasured"
    memory: Any = None
    stops: Mapping[str, float] = field(default_factory=dict)
    lasts: int = 1
    followed: int = 1

    def num_kept(self, domain: str, source: Source, match: int = 0, whole: bool = True) -> int:
        """Return how many tokens of a proposal are to be verified at most."""
        kind = kind_of(source, match, whole)
        return self.longest.get((domain, source, kind), self.num_passes if source == "head" else 0)
