"""The policy by hand, and in a served batch in which the truth is known (`simulated`)."""

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from models.core.throughput.cost import Cost, Time
from models.core.throughput.running import Acceptance, Lookup
from models.lengths import SequenceState, View, goodput
from tests.models.lengths.simulated import ADAPTED, BAD, FRESH, WITH_UNITS, WITHOUT, Machine, Served, best_fixed
from tests.models.pairs.forms import chosen

WARM_UP = 500  # steps
STEADY = goodput.Params(explore=0.0)
# A row takes 1 ms, a pass 2, a plain step of one sequence 10.
TIMES = [*(Time(num, num * rows, 0, 9.0 + num * rows) for num in (1, 2) for rows in (1, 4)), Time(1, 1, 1, 12.0)]
COST = Cost.measured(TIMES)
MACHINES = pytest.mark.parametrize("machine", [WITH_UNITS, WITHOUT], ids=lambda machine: machine.name)
DRAFTS = {"bad": BAD, "fresh": FRESH, "adapted": ADAPTED}
# One stream, where a step tells least, and the most, of which each costs most; of the loads between some.
LOADED = chosen(
    list(product([WITH_UNITS, WITHOUT], DRAFTS, (1, 2, 4, 8, 16, 64))),
    lambda of: of[2] == 1 or (of[1], of[2]) == ("bad", 64),
)


def known(**chances: float) -> Acceptance:
    """Return what is known after so many steps that what came before them counts no more."""
    acceptance = Acceptance(memory=1_000_000)
    for domain, chance in chances.items():
        for number in range(1000):
            accepted = int((number + 1) * chance) - int(number * chance)
            acceptance.see(domain, "head", 1, accepted)
    return acceptance


def test_the_plan_is_the_one_worked_out_by_hand() -> None:
    # Plain 1 / 10, one token 1.5 / 13: the better by 15%.
    plan = goodput.plan(COST, known(code=0.5), [SequenceState("code")], 1, None, STEADY)
    assert (plan.num_passes, plan.why, plan.skip, plan.lasts) == (1, "pays", False, 1)
    assert plan.plain_tokens_per_s == pytest.approx(100.0)
    assert plan.tokens_per_s == pytest.approx(1500 / 13, rel=0.01)
    # 1.25 / 13 is less than 1 / 10.
    plan = goodput.plan(COST, known(code=0.25), [SequenceState("code")], 1, None, STEADY)
    assert (plan.num_passes, plan.why) == (0, "loses")
    assert plan.tokens_per_s == plan.plain_tokens_per_s


def test_where_all_tokens_cost_one_pass_more_of_them_pay() -> None:
    """By tokens 1.6 / 13, 1.96 / 16 and 2.176 / 19; in one pass 1.6 / 13, 1.96 / 14 and 2.176 / 15."""
    acceptance = Acceptance()
    acceptance.promise("code", [0.6, 0.36, 0.216])
    plan = goodput.plan(COST, acceptance, [SequenceState("code")], 3, None, STEADY)
    assert plan.num_passes == 1
    plan = goodput.plan(replace(COST, one_pass=True), acceptance, [SequenceState("code")], 3, None, STEADY)
    assert (plan.num_passes, plan.num_kept("code", "head")) == (3, 3)
    assert plan.tokens_per_s == pytest.approx(2176 / 15, rel=0.01)
    acceptance.start({})
    acceptance.promise("code", [0.6, 0.06, 0.006])
    plan = goodput.plan(replace(COST, one_pass=True), acceptance, [SequenceState("code")], 3, plan, STEADY)
    assert (plan.num_passes, plan.settled, plan.num_kept("code", "head")) == (1, 1, 1)


@pytest.mark.parametrize(("prompt_tokens", "num_passes", "tokens_per_s"), [(0, 1, 115), (2, 1, 103), (6, 0, 100)])
def test_a_draft_that_gains_less_than_it_takes_to_read_the_prompts_does_not_pay(
    prompt_tokens: float, num_passes: int, tokens_per_s: int
) -> None:
    """Plain 1 / 10, one token 1.5 / 13, 1.5 / 14.5 or 1.5 / 17.5: a prompt's token takes the draft 0.5 ms."""
    cost = Cost.measured([*TIMES, Time(2, 2, 1, 13.5)])
    reading = replace(cost, prompt_tokens=prompt_tokens)
    plan = goodput.plan(reading, known(code=0.5), [SequenceState("code")], 1, None, STEADY)
    assert (plan.num_passes, round(plan.tokens_per_s)) == (num_passes, tokens_per_s)


def test_a_gain_under_the_margin_changes_nothing() -> None:
    # 1.308 / 13 is 0.6% more than 1 / 10.
    acceptance, running = known(code=0.308), [SequenceState("code")]
    assert goodput.plan(COST, acceptance, running, 1, None, STEADY).num_passes == 0
    eager = goodput.Params(explore=0.0, margin=0.0)
    drafts = goodput.plan(COST, acceptance, running, 1, None, eager)
    assert drafts.num_passes == 1
    assert goodput.plan(COST, acceptance, running, 1, drafts, STEADY).num_passes == 1


def test_rows_are_bought_only_for_domains_whose_tokens_are_worth_them() -> None:
    running = [SequenceState("code"), SequenceState("chat")]
    plan = goodput.plan(COST, known(code=0.9, chat=0.02), running, 1, None, STEADY)
    assert plan.num_passes == 1
    assert (plan.num_kept("code", "head"), plan.num_kept("chat", "head")) == (1, 0)


def test_look_up_is_taken_where_it_is_worth_more_than_the_head() -> None:
    acceptance = known(code=0.5)
    for _ in range(300):
        acceptance.see("code", "lookup", 3, 3, match=9)
        acceptance.see("code", "lookup", 3, 0, match=2)
    lookups = (Lookup(0.5, 9, 3), Lookup(0.3, 2, 3))
    plan = goodput.plan(COST, acceptance, [SequenceState("code", lookups)], 3, None, STEADY)
    assert plan.num_kept("code", "lookup", 9) == 9
    assert plan.num_kept("code", "lookup", 2) == 0


def test_a_long_look_up_is_cut_where_its_rows_become_dear_also_if_it_is_seldom_there() -> None:
    """Rows 2 to 9 take 0.25 ms each and those beyond 3; look-up proposes in three steps of ten."""
    plain = [Time(1, rows, 0, ms) for rows, ms in ((1, 20.0), (9, 22.0), (17, 46.0))]
    cost = Cost.measured([*plain, Time(1, 2, 1, 21.25)])
    acceptance, rng = known(code=0.5), np.random.default_rng(0)
    for _ in range(1000):
        acceptance.see("code", "lookup", 16, min(int(rng.geometric(0.15)) - 1, 16), match=9)
    plan = goodput.plan(cost, acceptance, [SequenceState("code", (Lookup(0.3, 9, 16),))], 1, None, STEADY)
    assert (plan.num_kept("code", "lookup", 9), plan.num_passes) == (8, 1)
    tokens = 1 + 0.3 * sum(0.85**place for place in range(1, 9)) + 0.7 * 0.5
    assert plan.tokens_per_s == pytest.approx(1000 * tokens / (0.3 * 22 + 0.7 * 20.25 + 1), rel=0.03)


def test_the_draft_rests_when_keeping_its_keys_has_taken_as_much_as_it_may_and_then_for_good() -> None:
    """A pass takes 2 ms and a step 10."""
    acceptance, plan, skips = known(code=0.1), None, []
    for _ in range(40):
        plan = goodput.plan(
            COST, acceptance, [SequenceState("code")], 3, plan, goodput.Params(explore=0.0, rest_after=1.0)
        )
        skips.append(plan.skip)
    assert skips == [False] * 5 + [True] * 35


def test_a_plan_at_rest_lasts_until_look_up_is_asked_again_and_leaves_the_same_as_a_plan_a_step() -> None:
    acceptance, running = known(code=0.1), [SequenceState("code", whole=False)]
    rests = goodput.plan(COST, acceptance, running, 3, None, goodput.Params(rest_after=0.0))
    assert (rests.skip, rests.lasts, rests.memory.since) == (True, 7, 1)
    by_step = rests
    for _ in range(7):
        assert by_step.lasts == 8 - by_step.memory.since % 8
        by_step = goodput.plan(COST, acceptance, running, 3, by_step, goodput.Params(rest_after=0.0))
    at_once = goodput.plan(COST, acceptance, running, 3, replace(rests, followed=7), goodput.Params(rest_after=0.0))
    assert (by_step.look_up, at_once.look_up, at_once.lasts) == (True, True, 8)
    assert at_once.memory._replace(budget=0, put_by=0) == by_step.memory._replace(budget=0, put_by=0)
    assert at_once.memory[6:8] == pytest.approx(by_step.memory[6:8])


@pytest.mark.parametrize(("num_read", "rests"), [(0, False), (4, False), (100, True)])
def test_where_many_prompts_come_at_once_and_none_is_to_be_drafted_for_the_draft_does_not_read_them(
    num_read: int, rests: bool
) -> None:
    """A step of one sequence takes 10 ms, a pass 2 and a prompt's token 0.5."""
    cost = Cost.measured([*TIMES, Time(2, 2, 1, 13.5)])
    acceptance, plan = known(code=0.1), None
    plan = goodput.plan(replace(cost, num_read=num_read), acceptance, [SequenceState("code")] * 2, 3, plan, STEADY)
    assert (plan.settled, plan.skip) == (0, rests)
    drafts = goodput.plan(replace(cost, num_read=100), known(code=0.9), [SequenceState("code")], 3, plan, STEADY)
    assert drafts.num_passes  # where drafting pays, prompts are read


def test_without_a_table_the_limit_is_drafted_and_a_limit_of_0_is_kept() -> None:
    plan = goodput.plan(Cost(), Acceptance(), [SequenceState("code")], 3, None, STEADY)
    assert (plan.num_passes, plan.why) == (3, "unmeasured")
    assert goodput.plan(COST, known(code=0.9), [SequenceState("code")], 0, None, goodput.Params()).num_passes == 0


def test_a_batch_without_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        goodput.plan(COST, Acceptance(), [], 3, None, STEADY)


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "num_sequences"), [(WITH_UNITS, 64), (WITHOUT, 1)], ids=["a batch", "alone"])
def test_what_is_lost_by_learning_is_at_most_its_share_of_the_time(machine: Machine, num_sequences: int) -> None:
    """Nothing is ever accepted, and a third of the sequences has whole keys, which is more than at rest."""
    cost, acceptance, plan = machine.measure(np.random.default_rng(0)), known(code=0.0), None
    running = [SequenceState("code", whole=number % 3 == 0) for number in range(num_sequences)]
    line, spent, plain, explored = cost.line(num_sequences), 0.0, 0.0, 0
    assert line is not None
    for _ in range(12_000):
        plan = goodput.plan(cost, acceptance, running, 3, plan, goodput.Params(rest_after=0))
        whole = sum(one.whole for one in running)
        rows = num_sequences + whole * min(plan.num_passes, plan.num_kept("code", "head"))
        plain += line.target_ms(num_sequences)
        spent += line.step_ms(rows, plan.num_passes)
        explored += plan.why == "explores"
    print(f"{machine.name}, {num_sequences} sequences: {spent / plain - 1:.2%} of the time, {explored} steps")
    assert explored >= 24
    assert spent / plain - 1 <= goodput.Params().explore


def test_one_sequence_of_the_reference_engine_is_planned_by_its_own_steps() -> None:
    def length(steps: tuple[tuple[int, int], ...]) -> int:
        view = View(limit=1, steps=steps, num_running=1, cost=COST)
        return goodput.num_draft_tokens(view, goodput.Params())

    assert length(((1, 1),) * 9) == 1
    assert length(((1, 0),) * 9) == 0
    # Lost with one token of which nothing is accepted: 30% of a step, so one in 60 is tried.
    assert length((*((1, 0),) * 9, *((0, 0),) * 59)) == 0
    assert length((*((1, 0),) * 9, *((0, 0),) * 60)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "name", "load"), LOADED, ids=lambda one: getattr(one, "name", str(one)))
def test_it_never_loses_and_is_near_the_best_fixed_length(machine: Machine, name: str, load: int) -> None:
    served, draft = Served(machine, {"code": DRAFTS[name]}, np.random.default_rng(load)), DRAFTS[name]
    served.run(WARM_UP + (1500 if load < 64 else 500), load)
    gain, best = served.gain(WARM_UP), best_fixed(machine, draft, load)
    print(f"{machine.name}, a = {draft}, {load} sequences: {gain:.3f}, best fixed {best:.3f}", end="; ")
    print(f"warm-up {served.gain(0, WARM_UP):.3f}, {served.changes()} changes")
    assert gain >= 0.97
    assert served.gain(0, WARM_UP) >= 0.94
    assert gain >= 0.95 * best
    assert served.changes() <= 6


@pytest.mark.slow
@MACHINES
def test_it_never_loses_while_load_acceptance_and_machine_change(machine: Machine) -> None:
    """Requests differ, two domains are mixed, load jumps every 100 steps, and the machine slows down by 15%."""
    served = Served(machine, {"code": ADAPTED, "chat": BAD}, np.random.default_rng(1), spread=0.3)
    for number in range(3600):
        served.slowness = 1.15 if number // 250 % 2 else 1.0
        served.step((1, 16, 1, 4, 32, 2)[number // 100 % 6])
    jumps = 36
    print(f"{machine.name}: {served.gain(WARM_UP):.3f}, {served.changes()} changes in {jumps} loads")
    assert served.gain(WARM_UP) >= 0.97
    assert served.changes() <= 3 * jumps


@pytest.mark.slow
@MACHINES
@pytest.mark.parametrize("draft", [BAD, ADAPTED], ids=["bad", "adapted"])
def test_it_neither_loses_nor_flaps_on_a_recorded_trace(machine: Machine, draft: tuple[float, ...]) -> None:
    """Load and times of a real engine whose machine did other work as well, from 1 to 16 sequences and back."""
    steps = json.loads((Path(__file__).parent / "trace.json").read_text())["steps"]
    served = Served(machine, {"code": draft}, np.random.default_rng(6))
    for load, percent in steps + steps:
        served.slowness = percent / 100
        served.step(load)
    loads = sum(left.bit_length() != right.bit_length() for (left, _), (right, _) in pairwise(steps + steps))
    start = len(steps) // 2
    print(f"{machine.name}: {served.gain(start):.3f}, {served.changes()} changes in {loads} loads")
    assert served.gain(start) >= 0.97
    assert served.changes() <= loads + 4


@pytest.mark.slow
@MACHINES
def test_a_better_draft_is_used_at_once_and_one_that_broke_is_dropped_soon(machine: Machine) -> None:
    adapted, dropped = [], []
    for seed in range(3):
        served = Served(machine, {"code": BAD}, np.random.default_rng(seed))
        served.run(1500, 1)
        assert served.plans[-1].settled == 0
        served.swap(ADAPTED, promised=ADAPTED)
        left = served.answers[0].left
        served.run(1000, 1)
        # The answer that ran while the draft rested lacks keys to its end.
        assert any(plan.settled for plan in served.plans[1500 : 1500 + left + 2])
        assert served.gain(1500, 1700) >= 0.97
        adapted.append(served.gain(1700) / best_fixed(machine, ADAPTED, 1))
        served.swap(BAD, promised=ADAPTED)
        served.run(2000, 1)
        dropped.append(next(number for number, plan in enumerate(served.plans[2500:]) if plan.settled == 0))
        print(f"{machine.name}: {adapted[-1]:.3f} of the best length, dropped after {dropped[-1]} steps")
        assert served.gain(2500 + dropped[-1]) >= 0.97
    assert np.mean(adapted) >= 0.95
    assert np.mean(dropped) <= 150


@pytest.mark.slow
@MACHINES
def test_a_table_in_which_more_rows_are_a_quarter_too_cheap_costs_next_to_nothing(machine: Machine) -> None:
    """Short contexts as measured at the start make the target's rows cheaper than those that are served."""
    served = Served(machine, {"code": FRESH}, np.random.default_rng(1))
    wrong = [
        curve._replace(points=(curve.points[0], *(0.75 * ms for ms in curve.points[1:])))
        for curve in served.cost.curves
    ]
    served.cost = replace(served.cost, curves=tuple(wrong))
    served.run(800, 16)
    print(f"{machine.name}: {served.gain(100):.3f}, best {best_fixed(machine, FRESH, 16):.3f}")
    assert served.gain(100) >= 0.97 * max(best_fixed(machine, FRESH, 16), 1.0)


@pytest.mark.slow
@MACHINES
def test_acceptance_that_rises_without_a_swap_is_found(machine: Machine) -> None:
    """At one stream, where a stretch of 32 steps is all that is learned from."""
    served = Served(machine, {"code": BAD}, np.random.default_rng(3))
    served.run(1000, 1)
    served.drafts["code"] = ADAPTED
    while not any(plan.settled for plan in served.plans[1000:]) and len(served.plans) < 13_000:
        served.run(200, 1)
    print(f"{machine.name}: found after {len(served.plans) - 1000} steps")
    assert served.plans[-1].settled
    assert served.gain(1000) >= 0.97
