"""What judging a draft costs, where the truth is known."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import Acceptance
from models.engines.vllm.planning import EVERY, NUMS, MeasurementOverhead
from models.lengths import Plan, SequenceState, goodput

K = 3
RUNNING = [SequenceState("code")]


def cost() -> Cost:
    """A step takes 10 ms, a row beyond one a sequence 0.2, a pass 0.5 for each sequence."""
    times = [
        Time(num, num + more, passes, 10 + 0.2 * more + 0.5 * num * passes)
        for num in (1, 8, 64)
        for more, passes in ((0, 0), (0, K), (num, 0), (3 * num, 0))
    ]
    return Cost.measured(times * 4, "here")


def judging(plan: Plan) -> MeasurementOverhead:
    return MeasurementOverhead(cast("ModuleType", SimpleNamespace(plan=lambda *_: plan)), goodput.Params(), K)


def accepted() -> Acceptance:
    acceptance = Acceptance()
    acceptance.promise("code", [0.2, 0.06, 0.04])
    return acceptance


@pytest.mark.parametrize(
    ("settles", "lost"),
    [
        (0, (3 * 0.5 + 3 * 0.2 - 0.3) / 10),  # what it takes, at a token a ms, less what it brings
        (1, (3 * 0.5 + 2 * 0.2 - 0.1) / 14),  # three passes over it take less than two more over all
        (3, 0.0),
    ],
)
def test_what_is_lost_for_eight_is_known_while_one_runs(settles: int, lost: float) -> None:
    judged = judging(Plan(settles, settled=settles, tokens_per_s=1000.0))
    judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[NUMS.index(8)] == pytest.approx(lost, abs=0.01)


def test_prompts_that_the_draft_reads_only_to_be_judged_are_part_of_it() -> None:
    """Where it drafts for others it reads them in any case."""
    few, many = cost(), replace(cost(), prompt_tokens=60.0)
    for settles, dearer in ((0, True), (1, False)):
        judged, reading = (judging(Plan(settles, settled=settles, tokens_per_s=1000.0)) for _ in range(2))
        judged.step(few, accepted(), RUNNING)
        reading.step(many, accepted(), RUNNING)
        assert (reading.lost[0] > judged.lost[0]) == dearer


def test_it_is_reckoned_now_and_then_and_where_it_expired() -> None:
    judged = judging(Plan(0, skip=True, tokens_per_s=1000.0))
    judged.step(Cost(), accepted(), RUNNING)
    assert judged.lost == (0.0,) * len(NUMS)  # nothing was measured
    for _ in range(EVERY):
        judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[0] == 0.0
    judged.step(cost(), accepted(), RUNNING)
    assert judged.lost[0] > 0
    judged.expire()
    judged.step(Cost(), accepted(), RUNNING)
    assert judged.lost[0] == 0.0
