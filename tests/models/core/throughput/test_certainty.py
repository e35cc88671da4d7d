"""Chains that end where the draft is unsure, in a service in which it is known how often each token is right."""

from collections.abc import Callable

import numpy as np
import pytest

from models.core.throughput.certainty import Certainty
from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import Acceptance
from models.lengths import Plan, SequenceState, goodput

K, PLAIN_MS, ROW_MS, PASS_MS = 3, 7.5, 0.5, 0.4  # of SmolLM2-135M on two cores of an AMD EPYC, about
NUM_STEPS = 4000
Says = Callable[[float], float]
DRAFTS: dict[str, Says] = {
    "is right": lambda chance: chance,
    "is surer than it may be": lambda chance: chance**0.5,
    "is too modest": lambda chance: chance**2,
}


def ms_of(num_rows: int, num_passes: int) -> float:
    return PLAIN_MS + ROW_MS * (num_rows - 1) + PASS_MS * num_passes


def measured() -> Cost:
    shapes = [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (3, 2), (4, 3)]
    times = [Time(num, num * rows, passes, num * ms_of(rows, passes)) for num in (1, 2) for rows, passes in shapes]
    return Cost.measured([one for one in times for _ in range(9)], "a machine")


class Service:
    """One stream: tokens are right by chances that vary from token to token, and that the draft knows more or less."""

    def __init__(self, says: Says, end_early: bool = True, least: float | None = None) -> None:
        self.rng, self.says, self.least = np.random.default_rng(5), says, least
        self.cost, self.acceptance = measured(), Acceptance()
        self.params = goodput.Params(end_early=end_early)
        self.plan: Plan | None = None
        self.num_tokens = self.ms = 0.0
        self.late: tuple[float, float] = (0.0, 0.0)

    def run(self) -> float:
        """Return tokens a ms of the second half."""
        for step in range(NUM_STEPS):
            self.step()
            if step == NUM_STEPS // 2:
                self.late = self.num_tokens, self.ms
        return (self.num_tokens - self.late[0]) / (self.ms - self.late[1])

    def step(self) -> None:
        """Draft by a plan, and verify."""
        sequence = SequenceState("code")
        self.plan = goodput.plan(self.cost, self.acceptance, [sequence], K, self.plan, self.params)
        num_wanted = self.plan.num_kept("code", "head")
        least = self.plan.stops.get("code", 0.0) if self.least is None else self.least
        told, right, chance = [], [], 1.0
        for one in self.rng.beta(0.6, 0.6, size=num_wanted):
            chance *= one
            told.append(self.says(chance))
            right.append(bool(self.rng.random() < one))
            if told[-1] < least:
                break
        num_accepted = right.index(False) if False in right else len(right)
        if told:
            self.acceptance.see("code", "head", len(told), num_accepted, num_wanted=num_wanted, chances=told)
        self.num_tokens += 1 + num_accepted
        self.ms += ms_of(1 + len(told), max(len(told), 0 if self.plan.skip else 1))


@pytest.mark.parametrize("says", DRAFTS.values(), ids=DRAFTS)
def test_chains_that_end_early_give_as_many_tokens_as_by_the_best_fixed_limit(says: Says) -> None:
    whole, ended = Service(says, end_early=False).run(), Service(says).run()
    best = max(Service(says, least=least).run() for least in (0.1, 0.3, 0.5))
    assert ended > 1.01 * whole
    assert ended > 0.99 * best


def test_what_is_expected_of_chains_that_end_early_is_what_comes() -> None:
    service = Service(DRAFTS["is right"])
    came = service.run()
    assert service.plan is not None and service.plan.why != "loses"
    assert service.plan.tokens_per_s == pytest.approx(1000 * came, rel=0.03)
    assert service.plan.plain_tokens_per_s == pytest.approx(1000 / PLAIN_MS, rel=0.02)


def test_a_draft_is_believed_until_it_is_known_how_often_it_is_right() -> None:
    certainty = Certainty()
    assert certainty.least(0.3) == pytest.approx(0.3)  # whose middle is 0.325
    assert (certainty.least(0.0), certainty.least(0.99)) == (0.0, 1.0)
    rng = np.random.default_rng(2)
    for _ in range(4000):
        chance = rng.random()
        certainty.see([chance], int(rng.random() < chance**2))
    assert certainty.least(0.25) == pytest.approx(0.5, abs=0.1)


def test_chances_of_a_chain_count_each_for_its_place() -> None:
    certainty = Certainty()
    for _ in range(1000):
        certainty.see([0.9, 0.5, 0.1], 1)
    assert certainty.least(0.95) == 0.9
    assert certainty.least(0.1) in (0.15, 0.55, 0.9)  # bins that were never seen are what the draft says of them
