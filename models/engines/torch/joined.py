"""Look-up joined to a draft: a step is drafted by whichever of the two is expected to have more accepted for its time.

The policy that plans the serving engine's steps plans these, by the same estimates, for one sequence at a time. What is
looked up costs no pass of the draft, whose keys are whole all the same: it reads what is certain in any case.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

from models.core.drafting.lookup import NOTHING, NgramIndex
from models.core.throughput.cost import Cost
from models.core.throughput.running import Acceptance
from models.engines import LookUp
from models.lengths import Plan, SequenceState
from models.params import BaseParams

# The reference engine knows neither domains nor keys.
DOMAIN, KEY = "", ""


class StepChoice(NamedTuple):
    """How a step drafts.

    Attributes:
        token_ids: that were looked up, in place of the draft's.
        match: tokens that had matched; 0 where the draft drafts.
        num_tokens: of the draft, at most; 0 for none.
    """

    token_ids: list[int]
    match: int
    num_tokens: int


NO_TURN = StepChoice([], 0, 0)


class Joined:
    """What the requests of an engine share: texts that are looked up, and what was accepted of either source."""

    def __init__(self, lookup: LookUp, lengths: tuple[ModuleType, BaseParams], limit: int) -> None:
        """Know nothing yet; the lengths are the policy and its keys, which can plan, and `limit` is K of the draft."""
        self._lookup, self._limit = lookup, limit
        self._policy, self._params = lengths
        self._library = NgramIndex(lookup.shortest, lookup.longest, lookup.remembered)
        self._acceptance = Acceptance()
        self._plan: Plan | None = None

    def turn(self, request_id: str, prompt_ids: list[int], token_ids: list[int], cost: Cost) -> StepChoice:
        """Choose how the next step of a request drafts, after so much of its answer."""
        sequence = self._library.sequence(request_id, KEY, len(prompt_ids))
        known = [*prompt_ids, *token_ids]
        sequence.extend(known[len(sequence) :])
        running = SequenceState(DOMAIN, self._acceptance.lookups(DOMAIN))
        plan: Plan = self._policy.plan(cost, self._acceptance, [running], self._limit, self._plan, self._params)
        self._plan = plan
        match = sequence.look_up(self._lookup.num_tokens) if plan.look_up else NOTHING
        if plan.look_up:
            self._acceptance.see_lookup(DOMAIN, match.length, len(match.token_ids))
        kept = plan.num_kept(DOMAIN, "lookup", match.length) if match.length else 0
        if kept:
            return StepChoice(match.token_ids[:kept], match.length, 0)
        return StepChoice([], 0, min(plan.num_kept(DOMAIN, "head"), plan.num_passes))

    def see(self, turn: StepChoice, num_drafted: int, num_accepted: int) -> None:
        """Take in what was accepted of a step."""
        self._acceptance.see(DOMAIN, "lookup" if turn.match else "head", num_drafted, num_accepted, turn.match)

    def swapped(self) -> None:
        """Forget what was accepted of the draft, which is another now."""
        self._acceptance.start({})

    def close_all_but(self, request_ids: Iterable[str]) -> None:
        """Let what has ended be looked up."""
        self._library.close_all_but(request_ids)
