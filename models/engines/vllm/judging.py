"""What it costs to judge the served draft by a request that the head alone drafts for. Imports no vLLM."""

from collections.abc import Sequence
from itertools import cycle, islice
from types import ModuleType

from models.lengths import Plan, Running
from models.params import BaseParams
from models.throughput.cost import Cost
from models.throughput.running import Acceptance

# Numbers of requests for which it is reckoned, and steps between two times that it is.
NUMS = (1, 2, 4, 8, 16, 32, 64)
EVERY = 64


class Judging:
    """Reckons it now and then, for more requests than run and for fewer, since they come and go faster.

    Attributes:
        lost: share of the tokens of all that is lost, for each of `NUMS`; empty before the first time.
    """

    def __init__(self, policy: ModuleType, params: BaseParams, limit: int) -> None:
        """Say by which policy the others are drafted, with which parameters and up to how many tokens (K)."""
        self.lost: tuple[float, ...] = ()
        self._policy, self._params, self._limit = policy, params, limit
        self._due_in = 0  # steps

    def expire(self) -> None:
        """Reckon anew at the next step: the draft is another, or what steps take was measured."""
        self._due_in = 0

    def step(self, cost: Cost, acceptance: Acceptance, running: Sequence[Running]) -> None:
        """Take a step of requests that the policy drafts for; costs as much as `NUMS` plans when it is due."""
        self._due_in -= 1
        if self._due_in < 0:
            self.lost = tuple(self._lost(cost, acceptance, list(islice(cycle(running), num))) for num in NUMS)
            self._due_in = EVERY

    def _lost(self, cost: Cost, acceptance: Acceptance, running: Sequence[Running]) -> float:
        """Return what is lost if one of the sequences is a judged one: 0 as long as too little was measured."""
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
