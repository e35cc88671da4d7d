"""Every length policy stays within its limit, and the shape they share holds those that look at more than counts.

`Confident` stops a step as Kangaroo (arXiv:2404.18911) and SpecDec++ (arXiv:2405.19715) do, by how sure the draft is of
its tokens so far; `Goodput` notes what `goodput`, which chooses before a step, is shown.
"""

import asyncio
import math
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from models import catalog
from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import NUM_PLACES, Acceptance, Lookup
from models.engines import Completion, Sampling
from models.engines.torch import Params, TorchEngine
from models.lengths import Plan, SequenceState, View, goodput

POLICIES = [catalog.load("lengths", name) for name in catalog.names("lengths")]
HISTORIES = [(), ((3, 0),) * 20, ((3, 3),) * 20, ((0, 0), (1, 1), (3, 2))]
COSTS = [Cost(), Cost.measured([Time(1, 1, 0, 10.0), Time(1, 4, 0, 12.0), Time(1, 2, 1, 12.2)])]
SERVING = [policy for policy in POLICIES if hasattr(policy, "plan")]
PROMPT = list(range(5, 17))
GREEDY = Sampling(max_tokens=24, ignore_eos=True)


class Confident(ModuleType):
    """Draft on while all tokens of the step are right with a probability above `threshold`."""

    def __init__(self, threshold: float) -> None:
        super().__init__("confident")
        self.threshold = threshold
        self.asked: list[tuple[float, ...]] = []

    def num_draft_tokens(self, view: View, params: None) -> int:
        return view.limit

    def go_on(self, view: View, params: None) -> bool:
        self.asked.append(view.confidences)
        return math.prod(view.confidences) > self.threshold


class Goodput(ModuleType):
    """The policy of that name, and what it was shown."""

    def __init__(self) -> None:
        super().__init__("goodput")
        self.views: list[View] = []

    def num_draft_tokens(self, view: View, params: None) -> int:
        self.views.append(view)
        return goodput.num_draft_tokens(view, goodput.Params())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_length_is_from_zero_to_the_limit(policy: ModuleType, limit: int) -> None:
    for steps, cost in product(HISTORIES, COSTS):
        view = View(limit=limit, steps=steps, num_running=2, cost=cost)
        assert 0 <= policy.num_draft_tokens(view, policy.Params()) <= limit
        if hasattr(policy, "go_on"):
            asked = View(limit, steps, 2, cost, confidences=(0.9,))
            assert isinstance(policy.go_on(asked, policy.Params()), bool)


@pytest.mark.parametrize("name", ["confidence", "fixed", "pearl", "specdec_pp"])
def test_as_many_tokens_as_may_be_are_drafted_whatever_was_accepted(name: str) -> None:
    policy = catalog.load("lengths", name)
    views = [View(limit=3, steps=steps, num_running=1, cost=Cost()) for steps in HISTORIES]
    assert [policy.num_draft_tokens(view, policy.Params()) for view in views] == [3] * len(HISTORIES)


def serve(
    target: Path, draft: Path, policy: ModuleType | None, max_tokens: tuple[int, ...] = (24,), cost: Cost | None = None
) -> list[Completion]:
    """Answer one prompt as often as there are limits, all at once."""

    async def ask() -> list[Completion]:
        engine = await TorchEngine.start(target, draft, Params(dtype="float32"))
        if policy is not None:
            engine.lengths = policy, None
        if cost is not None:
            engine.cost = cost
        asked = [GREEDY.model_copy(update={"max_tokens": limit}) for limit in max_tokens]
        return await asyncio.gather(*(engine.generate(PROMPT, one, str(n)) for n, one in enumerate(asked)))

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def plain(tiny_target: Path, tiny_draft: Path) -> Completion:
    return serve(tiny_target, tiny_draft, None)[0]


def test_a_policy_by_confidence_drafts_more_where_the_draft_is_sure(tiny_target, tiny_draft, plain) -> None:
    everything = Confident(0.0)
    serve(tiny_target, tiny_draft, everything)
    first = sorted(confidences[0] for confidences in everything.asked if len(confidences) == 1)
    policy = Confident(first[len(first) // 2])
    (answer,) = serve(tiny_target, tiny_draft, policy)
    assert len(set(answer.drafted)) > 1
    assert answer.token_ids == plain.token_ids
    sure = [confidences[0] > policy.threshold for confidences in policy.asked if len(confidences) == 1]
    assert [drafted > 1 for drafted in answer.drafted] == sure


def test_a_policy_by_load_drafts_nothing_while_many_are_served(tiny_target, tiny_draft, plain, monkeypatch) -> None:
    """Up to 8 rows cost the same, beyond them each costs its own; the table is fixed so that no clock counts."""
    monkeypatch.setattr(Cost, "after", lambda self, *times: self)
    rows = {1: 8.0, 8: 8.0, 16: 16.0, 32: 32.0}
    cost = Cost.measured([*(Time(1, number, 0, ms) for number, ms in rows.items()), Time(1, 1, 1, 8.1)])
    policy = Goodput()
    answers = serve(tiny_target, tiny_draft, policy, max_tokens=(8,) * 7 + (24,), cost=cost)
    assert answers[-1].token_ids == plain.token_ids
    lengths = {(view.num_running, policy.num_draft_tokens(view, None)) for view in policy.views[:]}
    assert {length for num_running, length in lengths if num_running == 8} == {0}
    assert max(length for num_running, length in lengths if num_running == 1) > 0
    assert answers[0].drafted == (0,) * 7
    assert max(answers[-1].drafted) > 0


def test_a_policy_sees_a_sequences_steps_and_what_they_take(tiny_target: Path, tiny_draft: Path) -> None:
    policy = Goodput()
    (answer,) = serve(tiny_target, tiny_draft, policy)
    first, last = policy.views[0], policy.views[-1]
    assert first == View(limit=3, steps=(), num_running=1, cost=Cost())
    assert len(last.steps) == len(policy.views) - 1
    (curve,) = last.cost.curves
    assert set(curve.rows) == {1 + drafted for drafted in answer.drafted[:-1]}
    assert curve.draft is not None


@pytest.mark.parametrize("policy", SERVING)
@pytest.mark.parametrize("limit", [1, 3, 8])
@pytest.mark.parametrize("cost", COSTS)
def test_a_plan_stays_within_its_limit_and_follows_from_what_it_was_given(policy, limit, cost) -> None:
    running = [SequenceState("code", (Lookup(0.3, 5, 4),)), SequenceState("chat"), SequenceState("chat", whole=False)]

    def plans() -> list[Plan]:
        acceptance, found = Acceptance(), [None]
        for step in range(200):
            found.append(policy.plan(cost, acceptance, running, limit, found[-1], policy.Params()))
            acceptance.see("chat", "head", limit, step % (limit + 1))
        return found[1:]

    for plan in plans():
        assert 0 <= plan.num_passes <= limit
        assert 0 <= plan.settled <= limit
        assert not (plan.skip and plan.num_passes)
        assert all(0 <= plan.num_kept(domain, "head") <= limit for domain in ("code", "chat"))
        assert 0 <= plan.num_kept("code", "lookup", 5) <= NUM_PLACES
    assert plans() == plans()
